"""Reports that a run waits for its chains, so that a slow model does not look like a hang."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

FIRST_REPORT_S = 5.0
"""Seconds until the first report; each later one comes after twice the time."""


@asynccontextmanager
async def report_waiting(describe_progress: Callable[[], str]) -> AsyncIterator[None]:
    """Report how far a run is on stderr after 5, 10, 20, … seconds; also where that is a notebook or a file.

    describe_progress: returns the progress in words, such as "2 of 4 chains finished".
    """

    async def report() -> None:
        started = time.perf_counter()
        delay = FIRST_REPORT_S
        while True:
            await asyncio.sleep(delay)
            seconds = time.perf_counter() - started
            if sys.stderr is not None:  # a program without a console has none
                print(f"{describe_progress()} after {seconds:.0f} s", file=sys.stderr, flush=True)
            delay = seconds

    reporter = asyncio.create_task(report())
    try:
        yield
    finally:
        reporter.cancel()
        with suppress(asyncio.CancelledError):
            await reporter
