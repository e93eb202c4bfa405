"""Removes what processes that are gone have left: folders, containers, and processes marked with their name."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil  # type: ignore[import-untyped]

from agentfly.errors import EnvironmentFault
from agentfly.resources.rpc.server import OWNER
from agentfly.sandbox.owner import PREFIX, is_leftover, remove_folder

SUPERVISOR, WORKER = "agentfly-superv", "agentfly-worker"
"""Process names; the kernel keeps fifteen characters."""
PROGRAM = "agentfly.resources.supervisor.process"
"""The module that a supervisor runs; it is in the command line from the first moment."""


def sweep(own: str) -> None:
    """Kill the marked processes and remove the named folders of owners that are gone.

    Also kills the processes of the owner `own`, left by an earlier supervisor of the same owner. Never kills a
    supervisor, or an interpreter that is about to become one: it may be cleaning up.
    """
    for process, owner in iter_owners():
        if (owner == own or is_leftover(owner)) and process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                name = process.name()
                starting = name != WORKER and any(PROGRAM in each for each in process.cmdline())
                if name != SUPERVISOR and not starting:  # workers share the supervisor's command line
                    process.kill()
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*"):
        if is_leftover(folder.name):
            with contextlib.suppress(OSError, EnvironmentFault):  # it may be another user's
                remove_folder(folder)


def iter_owners() -> Iterator[tuple[psutil.Process, str]]:
    """This user's processes with an owner in their environment, and that owner."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid() and (owner := process.environ().get(OWNER)) is not None:
                yield process, owner


def remove(kind: str, what: str) -> None:
    """Remove a `folder`, or a `container` given as `<address of the Docker API> <id>`."""
    if kind == "folder":
        with contextlib.suppress(OSError, EnvironmentFault):
            remove_folder(Path(what))
        return
    address, _, container = what.rpartition(" ")
    parts = urlsplit(address)
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_incrementing  # seldom needed

    for attempt in Retrying(
        retry=retry_if_exception_type((OSError, http.client.HTTPException)),
        wait=wait_incrementing(start=0.5, increment=0.5),
        stop=stop_after_attempt(3),
        retry_error_callback=lambda _: None,  # best effort: a supervisor has no caller to report to
    ):
        with attempt:
            if parts.scheme == "unix":
                connection = http.client.HTTPConnection("localhost", timeout=30)
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(30)
                connection.sock.connect(parts.path)
            else:
                connection = http.client.HTTPConnection(parts.hostname or "localhost", parts.port or 2375, timeout=30)
            with contextlib.closing(connection):
                connection.request("DELETE", f"/containers/{quote(container, safe='')}?force=1&v=1")
                status = connection.getresponse().status
                if status not in (204, 404):
                    raise OSError(f"status {status}")
