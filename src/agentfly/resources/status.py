"""The figures of every manager of this user on this machine, told over a socket to whoever asks.

Each live manager listens in a folder of the user's own, and adds nothing up until somebody asks. The sockets are named
after their process, so that those of a killed one are known, and removed by the next who looks or listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import os
import shlex
import socket
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from agentfly.errors import ConfigError, describe
from agentfly.resources.figures import Figures, Holder, Lent
from agentfly.resources.owner import PREFIX, is_leftover, process_name

PATIENCE = 3.0
"""Seconds that either end waits for the other."""
_numbers = itertools.count(1)
_LOG = logging.getLogger(__name__)
_not_served = functools.cache(functools.partial(_LOG.debug, "`agentfly env status` will not see this process: %s"))


@dataclass(frozen=True, slots=True)
class Report:
    """What one manager said when it was asked."""

    pid: int
    command: str = ""
    figures: tuple[Figures, ...] = ()
    silence: str = ""
    """Why it said nothing; empty where it answered."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def folders() -> list[Path]:
    """Where the sockets of this user are, the first choice first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    shared = Path(tempfile.gettempdir(), f"{PREFIX}-{os.getuid()}")
    return [Path(runtime, PREFIX), shared] if runtime else [shared]


async def serve(figures: WeakMethod[Any]) -> None:
    """Answer whoever asks, until cancelled. Where nobody can be answered, the run goes on without it."""
    try:
        door, path = _bound()
    except (OSError, AttributeError) as error:  # a system without such sockets does not even have their names
        _not_served(describe(error))
        return
    try:
        server = await asyncio.start_unix_server(functools.partial(_answer, figures), sock=door, start_serving=False)
        await server.serve_forever()
    except (OSError, NotImplementedError) as error:
        _not_served(describe(error))
    finally:
        door.close()
        _remove(path)


def _bound() -> tuple[socket.socket, Path]:
    """A socket that listens, in the first folder where one can be."""
    wrong: list[str] = []
    owner = process_name(os.getpid())
    if owner is None:
        raise OSError("there is no /proc")
    for folder in folders():
        path = folder / f"{owner}-{next(_numbers)}"
        hidden = folder / f".{path.name}"  # until it listens: a socket that refuses is taken for a dead one's
        door = socket.socket(socket.AF_UNIX)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _refuse_foreign(folder)
            _sweep(folder)
            door.bind(str(hidden))
            door.listen()
            hidden.rename(path)
        except OSError as error:
            door.close()
            _remove(hidden)
            wrong.append(f"{folder}: {error.strerror or error}")
        else:
            return door, path
    raise OSError("; ".join(wrong))


def _sweep(folder: Path) -> None:
    """Remove the sockets of processes that were killed."""
    for path in folder.iterdir():
        if is_leftover(path.name.lstrip(".")):
            _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is gone, or not ours to remove
        path.unlink()


def _refuse_foreign(folder: Path) -> None:
    """What somebody else can write to, he can listen in."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can open (mode 0700)")


async def _answer(figures: WeakMethod[Any], _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.set_write_buffer_limits(high=0)  # so that `drain` returns when everything is out
    try:
        tell = figures()
        told = {
            "command": shlex.join(sys.orig_argv)[:120],
            "figures": [each.to_json() for each in tell()] if tell is not None else [],
        }
        async with asyncio.timeout(PATIENCE):
            writer.write(json.dumps(told).encode())
            await writer.drain()
    except (OSError, TimeoutError) as error:
        _LOG.debug("somebody asked for figures and went away: %s", describe(error))
        writer.transport.abort()
    finally:
        writer.close()


async def reports() -> list[Report]:
    """What every manager of this user on this machine has to say, in the order of their processes."""
    found: list[Path] = []
    foreign: list[str] = []
    for folder in filter(os.path.lexists, folders()):
        try:
            _refuse_foreign(folder)
            found += folder.glob(f"{PREFIX}-*")
        except PermissionError as error:
            foreign.append(str(error))
    if foreign and not found:
        raise ConfigError(f"{'; '.join(foreign)}; remove it, or set XDG_RUNTIME_DIR to a folder of your own")
    told = await asyncio.gather(*map(_asked, found))
    return sorted((each for each in told if each is not None), key=lambda each: each.pid)


async def _asked(path: Path) -> Report | None:
    """What the manager behind a socket says; None where there is none any more, and then the socket is removed."""
    pid = int(path.name.split("-")[1]) if path.name.split("-")[1].isdigit() else 0
    try:
        if is_leftover(path.name):
            raise ConnectionRefusedError
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_unix_connection(path)
            with contextlib.closing(writer):
                data = await reader.read()
        told = json.loads(data)
        return Report(pid, told["command"], tuple(map(_figures, told["figures"])))
    except (ConnectionRefusedError, FileNotFoundError):
        _remove(path)
        return None
    except (TimeoutError, BlockingIOError):
        return Report(pid, silence="it does not answer: its event loop is busy, or the process is stopped")
    except OSError as error:
        return Report(pid, silence=f"it cannot be asked: {describe(error)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Report(pid, silence=f"its answer cannot be read, perhaps of another version: {describe(error)}")


def _figures(told: Mapping[str, Any]) -> Figures:
    leases = [
        Lent(each["instance"], tuple(Holder(**holder) for holder in each["holders"]), each["seconds"])
        for each in told["leases"]
    ]
    return Figures(**{**told, "leases": tuple(leases)})
