"""Live status of every resource manager of this user on this machine, served over Unix sockets.

Each live manager listens in a directory that belongs to the user, and collects its metrics only when a client connects.
Sockets are named after their process, so that the sockets of a killed process are recognized and removed by the next
reader or server.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakMethod

from agentfly.errors import ConfigError, describe
from agentfly.resources.metrics import PoolMetrics
from agentfly.sandbox.owner import PREFIX, is_leftover, process_name

TIMEOUT = 3.0
"""Seconds that either end waits for the other."""
_numbers = itertools.count(1)
_LOG = logging.getLogger(__name__)
_log_not_served = functools.cache(functools.partial(_LOG.debug, "`agentfly env status` will not see this process: %s"))


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """Status of one manager."""

    pid: int
    command: str = ""
    pools: tuple[PoolMetrics, ...] = ()
    error: str = ""
    """Why the manager could not be read; empty if it answered."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def socket_directories() -> list[Path]:
    """The directories for this user's sockets, in order of preference."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    shared = Path(tempfile.gettempdir(), f"{PREFIX}-{os.getuid()}")
    return [Path(runtime, PREFIX), shared] if runtime else [shared]


async def serve(pool_metrics: WeakMethod[Any]) -> None:
    """Send the metrics to every client that connects, until cancelled. Without a usable socket, log and return."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # `drain` returns when everything is sent
        try:
            collect = pool_metrics()
            pools = [each.to_json() for each in collect()] if collect is not None else []
            async with asyncio.timeout(TIMEOUT):
                writer.write(json.dumps({"command": shlex.join(sys.orig_argv)[:120], "pools": pools}).encode())
                await writer.drain()
        except (OSError, TimeoutError) as error:
            _LOG.debug("a status client disconnected: %s", describe(error))
            writer.transport.abort()
        finally:
            writer.close()

    try:
        listener, path = bind_socket()
    except (OSError, AttributeError) as error:  # a platform without Unix sockets lacks their constants too
        _log_not_served(describe(error))
        return
    try:
        server = await asyncio.start_unix_server(answer, sock=listener, start_serving=False)
        await server.serve_forever()
    except (OSError, NotImplementedError) as error:
        _log_not_served(describe(error))
    finally:
        listener.close()
        _remove(path)


def bind_socket() -> tuple[socket.socket, Path]:
    """A listening socket in the first usable directory. Removes the sockets of killed processes there."""
    errors: list[str] = []
    owner = process_name(os.getpid())
    if owner is None:
        raise OSError("there is no /proc")
    for directory in socket_directories():
        path = directory / f"{owner}-{next(_numbers)}"
        hidden = directory / f".{path.name}"  # until it listens: readers remove a socket that refuses connections
        listener = socket.socket(socket.AF_UNIX)
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            _require_private(directory)
            for existing in directory.iterdir():
                if is_leftover(existing.name.lstrip(".")):
                    _remove(existing)
            listener.bind(str(hidden))
            listener.listen()
            hidden.rename(path)
        except OSError as error:
            listener.close()
            _remove(hidden)
            errors.append(f"{directory}: {error.strerror or error}")
        else:
            return listener, path
    raise OSError("; ".join(errors))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # already removed, or owned by another user
        path.unlink()


def _require_private(directory: Path) -> None:
    """Raise unless only this user can write to the directory: another user could listen in it."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} is not a folder that only this user can open (mode 0700)")


async def read_statuses() -> list[ManagerStatus]:
    """The status of every manager of this user on this machine, ordered by process id."""
    sockets: list[Path] = []
    errors: list[str] = []
    for directory in filter(os.path.lexists, socket_directories()):
        try:
            _require_private(directory)
            sockets += directory.glob(f"{PREFIX}-*")
        except PermissionError as error:
            errors.append(str(error))
    if errors and not sockets:
        raise ConfigError(f"{'; '.join(errors)}; remove it, or set XDG_RUNTIME_DIR to a folder of your own")
    statuses = await asyncio.gather(*map(_read_status, sockets))
    return sorted((each for each in statuses if each is not None), key=lambda each: each.pid)


async def _read_status(path: Path) -> ManagerStatus | None:
    """The status of the manager behind a socket. If no process listens any more, remove the socket and return None."""
    pid = int(path.name.split("-")[1]) if path.name.split("-")[1].isdigit() else 0
    try:
        if is_leftover(path.name):
            raise ConnectionRefusedError
        async with asyncio.timeout(TIMEOUT):
            reader, writer = await asyncio.open_unix_connection(path)
            with contextlib.closing(writer):
                answer = json.loads(await reader.read())
        from pydantic import TypeAdapter  # workers import this module without pydantic

        pools = TypeAdapter(tuple[PoolMetrics, ...]).validate_python(answer["pools"])
        return ManagerStatus(pid, answer["command"], pools)
    except (ConnectionRefusedError, FileNotFoundError):
        _remove(path)
        return None
    except (TimeoutError, BlockingIOError):
        return ManagerStatus(pid, error="it does not answer: its event loop is busy, or the process is stopped")
    except OSError as error:
        return ManagerStatus(pid, error=f"it cannot be read: {describe(error)}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return ManagerStatus(pid, error=f"its answer cannot be read, perhaps of another version: {describe(error)}")
