"""The supervisor's process and the guardians it forks. It has a single thread, which makes forking safe.

At its start it sweeps what earlier processes have left: folders, and processes marked with the name of their owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]

from agentfly.errors import EnvironmentFault
from agentfly.resources.rpc import connection
from agentfly.resources.rpc.server import OWNER
from agentfly.sandbox.inside import guardian, kernel, process_tree
from agentfly.sandbox.owner import is_leftover, remove_folder, remove_leftover_folders

SUPERVISOR, WORKER = "agentfly-superv", "agentfly-worker"
"""Process names. The kernel keeps fifteen characters."""
PROGRAM = "agentfly.resources.supervisor.process"
"""The module that a supervisor runs. It is in the command line from the first moment."""
LINUX = sys.platform == "linux"
_END_SECONDS = 30.0


class SupervisorProcess:
    """Executes the commands of its owner, the process that started it, until the owner is gone."""

    def __init__(self, control: int, owner: int) -> None:
        self._control = socket.socket(fileno=control)
        self._owner = owner
        self._guardians: dict[int, int] = {}
        """Process id to the number of its worker."""
        self._registered: dict[tuple[str, str], None] = {}
        """Folders and containers to remove at the end."""
        self._wake = process_tree.wake_on_exit()

    def serve(self) -> None:
        """Run until the owner is gone.

        A forked child of the owner keeps the control socket open after the owner's death, so the owner's process is
        watched too.
        """
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        with contextlib.suppress(OSError, AttributeError):
            poller.register(os.pidfd_open(self._owner), select.POLLIN)
        self._control.setblocking(False)
        connected = True
        while connected and os.getppid() == self._owner:
            poller.poll(1000)
            for pid, status in process_tree.reap(self._wake):
                if self._guardians.pop(pid, None) is not None and not status:
                    continue
                # A killed guardian has not cleaned up: children that are not guardians were adopted from its worker.
                for child in psutil.Process().children() if LINUX else ():
                    if child.pid not in self._guardians:
                        process_tree.kill_below(child.pid)
                        with contextlib.suppress(psutil.Error):
                            child.kill()
            connected = self._receive()
        self._receive()  # commands sent just before the owner died

    def _receive(self) -> bool:
        """Execute all pending commands. False if the socket is closed."""
        while True:
            try:
                message, files, _, _ = socket.recv_fds(self._control, 65536, 4)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not message:
                return False
            self._execute(json.loads(message), files)

    def _execute(self, command: dict[str, Any], files: list[int]) -> None:
        """Start a worker with its guardian, end one, or register a resource. files: descriptors for a worker."""
        if command["do"] == "open":
            with contextlib.suppress(ImportError):
                importlib.import_module(command["load"])  # imported once, and shared by all later workers
            rpc_fd, exit_pipe = files
            supervisor = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                os.write(exit_pipe, f"no process can be forked: {error}\n".encode())
            else:
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for file in map(int, os.listdir("/dev/fd")):
                        if file > 2 and file not in (rpc_fd, exit_pipe):
                            with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
                                os.close(file)
                    run_guardian(rpc_fd, exit_pipe, supervisor)
                self._guardians[pid] = command["number"]
            os.close(rpc_fd)
            os.close(exit_pipe)
        elif command["do"] == "end":
            for pid in [pid for pid, number in self._guardians.items() if number == command["number"]]:
                os.kill(pid, signal.SIGTERM)  # our child and not reaped: the pid cannot have been reused
        elif command["do"] == "register":
            self._registered[command["kind"], command["what"]] = None
        else:
            self._registered.pop((command["kind"], command["what"]), None)

    def end_all(self) -> None:
        """Kill everything below this process, then remove the registered folders and containers."""
        deadline = time.monotonic() + _END_SECONDS
        for pid in self._guardians if not LINUX else ():
            os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            if LINUX:
                process_tree.kill_below(os.getpid())
            try:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    time.sleep(0.005)
            except ChildProcessError:
                break
        for kind, what in self._registered:
            remove(kind, what)


def main(control: int, owner: int) -> None:
    """Run the supervisor of process `owner`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # inherited by guardians, which wait for it
    _set_process_name(SUPERVISOR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # workers end by os._exit, which flushes nothing
    supervisor = SupervisorProcess(control, owner)
    if LINUX:
        kernel.adopt_orphans()
        sweep(os.environ.get(OWNER, ""))
    gc.collect()
    gc.freeze()
    try:
        supervisor.serve()
    except Exception:
        traceback.print_exc()
    finally:
        supervisor.end_all()
        os._exit(0)


def run_guardian(rpc_fd: int, exit_pipe: int, supervisor: int) -> NoReturn:
    """Run a worker that serves requests on the socket `rpc_fd`, and end it with all its descendants.

    Writes this process's pid to `exit_pipe` at the start, and the worker's wait status at the end.
    """
    failed = 1

    def report(number: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader has closed its end
            os.write(exit_pipe, f"{number}\n".encode())

    def run_worker() -> NoReturn:
        status = 1
        try:
            os.close(exit_pipe)
            os.setsid()
            _set_process_name(WORKER)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            asyncio.run(connection.serve(socket.socket(fileno=rpc_fd)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    try:
        report(os.getpid())
        status = guardian.guard(run_worker, supervisor, close=(rpc_fd,), term_seconds=0.0)
        if os.getppid() == supervisor:  # else its end is the reason
            report(status)
        failed = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(failed)


def _set_process_name(name: str) -> None:
    """Set the name that `ps` shows."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def sweep(owner_name: str) -> None:
    """Kill the marked processes and remove the named folders of owners that are gone.

    Also kills the processes of the owner `own`, left by an earlier supervisor of the same owner. Never kills a
    supervisor, or an interpreter that is about to become one: it may be cleaning up.
    """
    for process, owner in iter_owners():
        if (owner == owner_name or is_leftover(owner)) and process.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                name = process.name()
                starting = name != WORKER and any(PROGRAM in argument for argument in process.cmdline())
                if name != SUPERVISOR and not starting:  # workers share the supervisor's command line
                    process.kill()
    remove_leftover_folders()


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
    import docker  # these are seldom needed. A process that registers a container has them
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_incrementing

    address, _, container = what.rpartition(" ")
    for attempt in Retrying(
        retry=retry_if_exception_type((OSError, docker.errors.DockerException)),
        wait=wait_incrementing(start=0.5, increment=0.5),
        stop=stop_after_attempt(3),
        retry_error_callback=lambda _: None,  # best effort: a supervisor has no caller to report to
    ):
        with (
            attempt,
            contextlib.suppress(docker.errors.NotFound),
            contextlib.closing(docker.APIClient(address, version="auto", timeout=30)) as api,
        ):
            api.remove_container(container, v=True, force=True)
