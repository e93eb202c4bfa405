"""SIGTERM ends a command the way Ctrl-C does: environments are closed and leases released, then it exits with 143.

The default action of SIGTERM ends the process at once, and nothing in it is closed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
"""What a shell reports for a process that SIGTERM ended."""
REPEAT_SECONDS = 2.0
"""A second SIGTERM within this time has no effect: `timeout` sends one to a process and one to its group."""


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived outside an event loop."""


@contextmanager
def handle_sigterm() -> Iterator[None]:
    """Handle SIGTERM like SIGINT inside the block, and exit with 143 after one. A SIGTERM that is ignored stays so."""
    received: float | None = None

    def handle(_: int, frame: FrameType | None) -> None:
        nonlocal received
        if received is not None and time.monotonic() - received < REPEAT_SECONDS:
            return  # an exception in an event loop that cancels its tasks may leave one of them waiting forever
        received = time.monotonic()
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt) and interrupt is not signal.default_int_handler:
            interrupt(signal.SIGINT, frame)  # asyncio's: it cancels the main task, and `asyncio.run` raises
        else:
            raise Terminated

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # asyncio cancels the main task only if SIGINT has its default handler. An exception raised at any place of an
        # event loop instead may be lost. Blocked, SIGINT still has no effect.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, handle)
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        if received is not None:
            sys.exit(EXIT_CODE)
        raise
