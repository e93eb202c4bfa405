"""What a process that is gone has left: its folders, its containers, and the processes that carry its mark."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

from agentfly.errors import EnvironmentFault
from agentfly.resources.owner import PREFIX, is_leftover, remove_folder
from agentfly.resources.remote.serving import OWNER

KEEPER, WORKER = "agentfly-keeper", "agentfly-worker"
"""What processes here are called; the kernel keeps fifteen letters."""
PROGRAM = "agentfly.resources.keeper.process"
"""What a keeper runs, and has in its command line from the first moment on."""
_TRIES = 3


def sweep(own: str) -> None:
    """Kill the marked processes, and remove the named folders, of owners that are gone.

    So are the processes of `own`, which an earlier keeper of the same owner left. A keeper is left alone: it may be
    clearing up this very moment, or about to.
    """
    for pid, owner in _marked():
        if (owner == own or is_leftover(owner)) and pid != os.getpid() and not _keeps(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        if is_leftover(folder.name):
            with contextlib.suppress(OSError, EnvironmentFault):  # it may be another user's
                remove_folder(folder)


def _marked() -> Iterator[tuple[int, str]]:
    """The processes of this user that carry a mark, and whom it names."""
    mark = f"{OWNER}=".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if place.stat().st_uid == os.getuid():
                for each in (place / "environ").read_bytes().split(b"\0"):
                    if each.startswith(mark):
                        yield int(place.name), each[len(mark) :].decode(errors="replace")


def _keeps(pid: int) -> bool:
    """Whether a process is a keeper, or an interpreter that will become one. Workers share its command line."""
    with contextlib.suppress(OSError):
        started_as = Path(f"/proc/{pid}/cmdline").read_bytes()
        return name_of(pid) == KEEPER or (name_of(pid) != WORKER and PROGRAM.encode() in started_as)
    return False


def name_of(pid: int) -> str:
    """What a process calls itself; empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def remove(kind: str, what: str) -> None:
    """Remove a `folder`, or a `container` given as `address of the Docker API, a space, id`."""
    if kind == "folder":
        with contextlib.suppress(OSError, EnvironmentFault):
            remove_folder(Path(what))
        return
    address, _, container = what.rpartition(" ")
    for attempt in range(_TRIES):
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = _connection(address)
            with contextlib.closing(connection):
                connection.request("DELETE", f"/containers/{quote(container, safe='')}?force=1&v=1")
                if connection.getresponse().status in (204, 404):
                    return
        time.sleep(0.5 * (attempt + 1))


def _connection(address: str) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    if parts.scheme != "unix":
        return http.client.HTTPConnection(parts.hostname or "localhost", parts.port or 2375, timeout=30)
    connection = http.client.HTTPConnection("localhost", timeout=30)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(30)
    connection.sock.connect(parts.path)
    return connection
