"""The guardian of one worker: adopts what the worker leaves behind, and ends with it, and so does all below it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from agentfly.resources.keeper.leftovers import WORKER
from agentfly.resources.remote import worker as remote_worker
from agentfly.resources.sandbox.inside import kernel, tree

LINUX = sys.platform == "linux"
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def guard(line: int, fate: int, keeper: int) -> NoReturn:
    """Run a worker on `line`. On `fate` is told this process's pid, and in the end the worker's wait status."""
    failed = 1
    try:
        _die_with(keeper)
        if LINUX:
            kernel.adopt_orphans()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        own, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(fate)
            _work(line, own)
        os.close(line)
        _tell(fate, own)
        status = _wait(pid)
        _end_all(pid)
        _tell(fate, status)
        failed = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(failed)


def _tell(fate: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(fate, f"{number}\n".encode())


def _end_all(worker: int) -> None:
    if LINUX:
        tree.kill_below(os.getpid())
    else:
        with contextlib.suppress(OSError):
            os.killpg(worker, signal.SIGKILL)


def _wait(worker: int) -> int:
    """Until the worker has ended, by itself or because SIGTERM says so; its wait status."""
    while True:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            os.kill(worker, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                if ended[0] == worker:
                    return ended[1]
                if not ended[0]:
                    break


def _die_with(parent: int) -> None:
    if LINUX:
        kernel.die_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def _work(line: int, parent: int) -> NoReturn:
    """Be the worker."""
    status = 1
    try:
        _die_with(parent)
        os.setsid()
        call_itself(WORKER)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        asyncio.run(remote_worker.serve(socket.socket(fileno=line)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def call_itself(name: str) -> None:
    """Give this process a name that `ps` shows."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
