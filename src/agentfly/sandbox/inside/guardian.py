"""The guardian of a program that is not a sandbox session. Ends the program's descendants with it, all with the owner.

It starts the program with its own standard streams, adopts its orphans, and waits. When the program ends, when the
owner's process ends for any reason, or on SIGTERM, everything below it is killed. It exits as the program did.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

from . import kernel, process_tree

TERM_SECONDS = 1.0
"""Time for the program to end by itself after SIGTERM."""
_LINUX = sys.platform == "linux"


def main(config: dict[str, Any]) -> NoReturn:
    """Run `config["command"]` for the process `config["owner"]`."""
    wake, wake_writer = os.pipe()
    for end in (wake, wake_writer):
        os.set_blocking(end, False)
    terminated = [False]

    def terminate(*_: object) -> None:
        terminated[0] = True

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    if _LINUX:
        kernel.adopt_orphans()
    own = os.getpid()
    program = os.fork()
    if program == 0:
        _execute(config["command"], own)
    for stream in (0, 1):  # the owner sees the program's end of file, not ours
        os.close(stream)
    status = _wait(program, config["owner"], wake, terminated)
    if _LINUX:
        process_tree.kill_below(own)
    with contextlib.suppress(OSError):
        os.killpg(program, signal.SIGKILL)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _execute(command: list[str], guardian: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        if _LINUX:
            kernel.die_with_parent()
            if os.getppid() != guardian:
                os._exit(1)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def _wait(program: int, owner: int, wake: int, terminated: list[bool]) -> int:
    """Reap children until the program has ended, by itself or because it has to; return its wait status."""
    poller = select.poll()
    poller.register(wake, select.POLLIN)
    with contextlib.suppress(OSError, AttributeError):
        poller.register(os.pidfd_open(owner), select.POLLIN)
    deadline = None
    while True:
        for pid, status in process_tree.reap(wake):
            if pid == program:
                return status
        if os.getppid() != owner or (deadline is not None and time.monotonic() > deadline):
            os.kill(program, signal.SIGKILL)
        elif terminated[0] and deadline is None:
            deadline = time.monotonic() + TERM_SECONDS
            os.kill(program, signal.SIGTERM)
        poller.poll(50 if deadline is not None else 1000)
