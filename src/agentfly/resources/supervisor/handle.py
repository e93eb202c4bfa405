"""Starts the supervisor and its workers, and registers with it what must not outlive this process.

    this process ── supervisor ── guardian ── worker ── whatever an environment starts
                              └── guardian ── worker

The supervisor forks workers quickly because it has already imported what they need. Each worker has a guardian, which
adopts the worker's orphans and kills all of them when the worker ends. When this process ends for any reason, the
supervisor kills everything below it, removes the folders and containers registered with it, and exits.
This process's handle on it is started on first use, and restarted if it has died.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import agentfly
from agentfly.resources.rpc.server import OWNER
from agentfly.sandbox.owner import process_name
from agentfly.sandbox.results import describe_exit

END_SECONDS = 10.0
_SEND_SECONDS = 5.0
_PROGRAM = "import sys; sys.path[:0] = {path!r}; from agentfly.resources.supervisor.process import main; main({0}, {1})"


class Supervisor:
    """Starts and ends workers, and registers what must not outlive this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._running: _SupervisorHandle | None = None
        self._registered: dict[tuple[str, str], None] = {}

    @property
    def pid(self) -> int | None:
        """The supervisor's process id. None while it is not running."""
        return self._running.process.pid if self._running else None

    def open(self, load: str = "agentfly") -> Worker:
        """Start a worker that serves requests on `worker.socket`, with the module `load` already imported."""
        host_end, worker_end = socket.socketpair()
        exit_pipe, exit_writer = os.pipe()
        try:
            number = next(self._numbers)
            with worker_end:
                command = {"do": "open", "number": number, "load": load}
                running = self._send(command, worker_end.fileno(), exit_writer)
            return Worker(running, number, host_end, exit_pipe)
        except BaseException:
            host_end.close()
            os.close(exit_pipe)
            raise
        finally:
            os.close(exit_writer)

    def register(self, kind: str, what: str) -> None:
        """Have a `folder` or a `container` (`<address of the Docker API> <id>`) removed when this process is gone.

        Call it before creating the resource, so that no kill can come in between. A missing resource is ignored.
        """
        if kind not in ("folder", "container"):
            raise ValueError(f"a supervisor removes a folder or a container, not a {kind!r}")
        what = os.path.abspath(what) if kind == "folder" else what
        with self._lock:
            self._send({"do": "register", "kind": kind, "what": what})
            self._registered[kind, what] = None

    def unregister(self, kind: str, what: str) -> None:
        """Undo `register` after the resource has been removed."""
        what = os.path.abspath(what) if kind == "folder" else what
        with self._lock:
            if (kind, what) in self._registered:
                del self._registered[kind, what]
                if self._running is not None:
                    self._running.send({"do": "unregister", "kind": kind, "what": what})

    def close(self) -> None:
        """End the supervisor with its workers and registered resources. The next use starts a new one."""
        with self._lock:
            if self._running is not None:
                self._running.close()
                self._running = None
            self._registered.clear()

    def abandon(self) -> None:
        """In a forked child: drop the handle of the parent's supervisor without ending it."""
        if self._running is not None:
            self._running.control.close()
            self._running.process.returncode = 0  # not our child, nothing to wait for

    def _send(self, command: dict[str, Any], *files: int) -> _SupervisorHandle:
        """Send a command to a running supervisor, starting one if necessary."""
        with self._lock:
            for _ in range(2):
                if self._running is None or not self._running.alive:
                    if self._running is not None:
                        self._running.close(kill=True)
                    self._running = _SupervisorHandle.start()
                    for kind, what in self._registered:
                        self._running.send({"do": "register", "kind": kind, "what": what})
                running = self._running
                if running.send(command, *files):
                    return running
                running.close(kill=True)
            raise OSError("the supervisor of worker processes ends as soon as it is started; see its output on stderr")


class _SupervisorHandle:
    """One supervisor process."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.process = process
        self.control = control

    @classmethod
    def start(cls) -> _SupervisorHandle:
        # Both types keep message boundaries. Only SEQPACKET, which only Linux has, reports that the peer is gone.
        socket_type = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_DGRAM
        host_end, supervisor_end = socket.socketpair(socket.AF_UNIX, socket_type)
        host_end.settimeout(_SEND_SECONDS)
        path = [str(Path(agentfly.__file__).parents[1]), *(os.path.abspath(folder) for folder in sys.path)]
        with supervisor_end:
            program = _PROGRAM.format(supervisor_end.fileno(), os.getpid(), path=path)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=2,
                cwd="/",
                env={**os.environ, OWNER: process_name(os.getpid()) or ""},
                pass_fds=(supervisor_end.fileno(),),
                start_new_session=True,  # Ctrl-C goes to this process only, which decides what happens to its workers
            )
        return cls(process, host_end)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, command: dict[str, Any], *files: int) -> bool:
        """Send a command with file descriptors; whether it was accepted."""
        try:
            socket.send_fds(self.control, [json.dumps(command).encode()], files)
        except OSError:
            return False
        return True

    def close(self, kill: bool = False) -> None:
        """Ask it to end and wait up to END_SECONDS; a supervisor that is still removing resources keeps running."""
        self.control.close()
        if kill:
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)


class Worker:
    """One worker process with all its descendants."""

    def __init__(self, supervisor: _SupervisorHandle, number: int, connected: socket.socket, exit_pipe: int) -> None:
        self.socket = connected
        """Socket connected to the worker; closed by its user."""
        self._supervisor = supervisor
        self._number = number
        self._exit_pipe = exit_pipe
        os.set_blocking(exit_pipe, False)
        self._received = b""
        """From the guardian: its pid, a newline, and at the end the worker's wait status and a newline."""
        self._end_requested = False
        self._exit_reason: str | None = None

    @property
    def guardian(self) -> int | None:
        """Process id of the guardian. None before it has started and after all processes have ended."""
        exit_reason = self.poll()
        first = self._received.partition(b"\n")[0]
        return int(first) if exit_reason is None and first.isdigit() else None

    def poll(self) -> str | None:
        """Why the worker ended, once all its processes have. None while it runs."""
        while self._exit_reason is None:
            try:
                data = os.read(self._exit_pipe, 4096)
            except BlockingIOError:
                break
            self._received += data
            if not data or self._received.count(b"\n") == 2:
                self._finish(self._describe_exit())
        return self._exit_reason

    def _describe_exit(self) -> str:
        lines = self._received.decode(errors="replace").splitlines()
        if self._end_requested:
            return "its process was ended"
        if len(lines) == 2 and lines[1].isdigit():
            return f"its process ended with {describe_exit(int(lines[1]))}"
        if lines and not lines[0].isdigit():
            return lines[0]
        return "its process was killed" if self._supervisor.alive else "the supervisor of its process was killed"

    def _finish(self, reason: str) -> None:
        self._exit_reason = reason
        os.close(self._exit_pipe)

    def end(self) -> None:
        """Begin to kill all its processes, without waiting for them."""
        if self.poll() is None:
            self._end_requested = True
            self._supervisor.send({"do": "end", "number": self._number})

    def drop(self) -> None:
        """Kill all its processes and release the handle without waiting."""
        if self.poll() is None:
            self.end()
            self._finish(self._describe_exit())

    async def wait(self) -> str:
        """Wait up to END_SECONDS until all its processes have ended, then kill them; why the worker ended."""
        deadline = time.monotonic() + END_SECONDS
        while (reason := self.poll()) is None and time.monotonic() < deadline:  # noqa: ASYNC110, called from any loop
            await asyncio.sleep(0.005)
        if reason is None:  # the guardian does not react: kill it, and the kernel kills the worker with it
            if (pid := self.guardian) is not None:
                os.kill(pid, signal.SIGKILL)
            self._finish(reason := "its process did not end in time and was killed")
        return reason


_SUPERVISOR = Supervisor()


def get_supervisor() -> Supervisor:
    """The supervisor of this process."""
    return _SUPERVISOR


def _replace_after_fork() -> None:
    """In a forked child: the inherited supervisor belongs to the parent."""
    global _SUPERVISOR
    _SUPERVISOR.abandon()
    _SUPERVISOR = Supervisor()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_after_fork)
atexit.register(lambda: _SUPERVISOR.close())
