"""Guardians run programs that are not sandbox sessions: they end a program's descendants with it, all with the owner.

It starts the program in a child process, adopts its orphans, and waits. When the program ends, when the owner's process
ends for any reason, or on SIGTERM, everything below it is killed. As a program of its own it runs a command with its
standard streams, and exits as the command did.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from . import kernel, process_tree

TERM_SECONDS = 1.0
"""Time for a command to end by itself after SIGTERM."""
_LINUX = sys.platform == "linux"


def main(config: dict[str, Any]) -> NoReturn:
    """Run `config["command"]` for the process `config["owner"]`."""
    command = config["command"]

    def execute() -> NoReturn:
        try:
            os.setpgid(0, 0)
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)

    # The streams are closed here, so that the owner sees the end of file of the command.
    status = guard(execute, config["owner"], close=(0, 1), term_seconds=TERM_SECONDS)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def guard(run: Callable[[], NoReturn], owner: int, close: Iterable[int], term_seconds: float) -> int:
    """Call `run` in a child process; when it has ended, kill everything below this process. Returns its wait status.

    owner: the parent, whose end kills the child. close: file descriptors that only the child uses.
    term_seconds: time for the child to end by itself after a SIGTERM to this process. 0: it is killed.
    """
    deadlines: list[float] = []
    wake = process_tree.wake_on_exit()
    signal.signal(signal.SIGTERM, lambda *_: deadlines.append(time.monotonic() + term_seconds))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if _LINUX:
        kernel.adopt_orphans()
    guardian_pid = os.getpid()
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        if _LINUX:
            kernel.die_with_parent()
        if os.getppid() != guardian_pid:
            os._exit(1)
        run()
    for fd in close:
        os.close(fd)
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    interval: int | None = 1000  # milliseconds between two looks at the parent. None: its end wakes this process
    with contextlib.suppress(OSError, AttributeError):
        poller.register(os.pidfd_open(owner), select.POLLIN)
        interval = None
    terminated = False
    status = None
    while status is None:
        if os.getppid() != owner or (deadlines and time.monotonic() >= deadlines[0]):
            os.kill(child, signal.SIGKILL)
        elif deadlines and not terminated:
            terminated = True
            os.kill(child, signal.SIGTERM)
        poller.poll(50 if deadlines else interval)
        status = dict(process_tree.reap(wake)).get(child)
    if _LINUX:
        process_tree.kill_below(guardian_pid)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    return status
