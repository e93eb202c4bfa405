"""The keeper's own process. It has one thread, or forking would not be safe."""

from __future__ import annotations

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
from typing import Any

from agentfly.resources.keeper import leftovers
from agentfly.resources.keeper.guardian import LINUX, call_itself, guard
from agentfly.resources.remote.serving import OWNER
from agentfly.resources.sandbox.inside import kernel, tree

_END_SECONDS = 30.0


class KeeperProcess:
    """Does as it is told on the control socket until the process that started it is gone."""

    def __init__(self, control: int, owner: int) -> None:
        self._control = socket.socket(fileno=control)
        self._owner = owner
        self._guardians: dict[int, int] = {}
        """Process to the number of its worker."""
        self._remembered: dict[tuple[str, str], None] = {}
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Obey. A process that forked leaves its socket open when it dies, so the process itself is watched too."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        with contextlib.suppress(OSError, AttributeError):
            poller.register(os.pidfd_open(self._owner), select.POLLIN)
        self._control.setblocking(False)
        listening = True
        while listening and os.getppid() == self._owner:
            poller.poll(1000)
            self._reap()
            listening = self._listen()
        self._listen()  # what it said last counts too

    def _listen(self) -> bool:
        """Obey what has been said so far; whether more may be said."""
        while True:
            try:
                message, files, _, _ = socket.recv_fds(self._control, 65536, 4)
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if not message:
                return False
            self._obey(json.loads(message), files)

    def _obey(self, order: dict[str, Any], files: list[int]) -> None:
        if order["do"] == "open":
            with contextlib.suppress(ImportError):
                importlib.import_module(order["load"])  # once, and every worker after that shares it
            self._open(order["number"], *files)
        elif order["do"] == "end":
            for pid in [pid for pid, number in self._guardians.items() if number == order["number"]]:
                os.kill(pid, signal.SIGTERM)  # ours, and not reaped: the pid is still its
        elif order["do"] == "remember":
            self._remembered[order["kind"], order["what"]] = None
        else:
            self._remembered.pop((order["kind"], order["what"]), None)

    def _open(self, number: int, line: int, fate: int) -> None:
        keeper = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(fate, f"no process can be forked: {error}\n".encode())
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                _close_all_but(line, fate)
                guard(line, fate, keeper)
            self._guardians[pid] = number
        os.close(line)
        os.close(fate)

    def _reap(self) -> None:
        for pid, status in tree.ended(self._wake):
            if self._guardians.pop(pid, None) is None or status:  # a guardian that was killed cleared nothing up
                self._kill_strays()

    def _kill_strays(self) -> None:
        """End what has no guardian: it belonged to a worker whose guardian is gone."""
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in set(map(int, file.read().split())) - self._guardians.keys():
                tree.kill_below(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def end_all(self) -> None:
        """Kill whatever is below this process, then remove what was remembered."""
        deadline = time.monotonic() + _END_SECONDS
        for pid in self._guardians if not LINUX else ():
            os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            if LINUX:
                tree.kill_below(os.getpid())
            try:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    time.sleep(0.005)
            except ChildProcessError:
                break
        for kind, what in self._remembered:
            leftovers.remove(kind, what)


def _close_all_but(*kept: int) -> None:
    for file in map(int, os.listdir("/dev/fd")):
        if file > 2 and file not in kept:
            with contextlib.suppress(OSError):  # the one that listed them is closed
                os.close(file)


def main(control: int, owner: int) -> None:
    """Be the keeper of process `owner`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # to a guardian, which inherits this, it is an order
    call_itself(leftovers.KEEPER)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # workers end without ceremony; what they said is not lost
    keeper = KeeperProcess(control, owner)
    if LINUX:
        kernel.adopt_orphans()
        leftovers.sweep(os.environ.get(OWNER, ""))
    gc.collect()
    gc.freeze()
    try:
        keeper.serve()
    except Exception:
        traceback.print_exc()
    finally:
        keeper.end_all()
        os._exit(0)
