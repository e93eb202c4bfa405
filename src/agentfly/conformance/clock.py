"""Time limits in CPU time, so that a loaded machine does not fail a sound environment.

A limit of n seconds is exceeded when n seconds have passed and this process and its children have used more than n
seconds of CPU time or, regardless of CPU time, when `WALL` times n seconds have passed: then something hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil  # type: ignore[import-untyped]

WALL = 5.0
"""Wall-clock seconds per second of a limit."""
_POLL = 0.05


class Stopwatch:
    """CPU time and wall-clock time since its creation."""

    def __init__(self) -> None:
        self._cpu = cpu_seconds()
        self._wall = time.monotonic()

    def exceeds(self, seconds: float) -> bool:
        """Whether more time has passed than the limit allows."""
        wall = time.monotonic() - self._wall
        if wall <= seconds:
            return False
        return wall > WALL * seconds or cpu_seconds() - self._cpu > seconds


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Like `asyncio.timeout`, measured by a `Stopwatch`. Raises TimeoutError."""
    watch = Stopwatch()

    async def poll(limit: asyncio.Timeout) -> None:
        await asyncio.sleep(seconds)
        while not watch.exceeds(seconds):  # noqa: ASYNC110  (CPU time has no event to wait for)
            await asyncio.sleep(max(_POLL, seconds / 100))
        limit.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as limit:
        polling = asyncio.create_task(poll(limit))
        try:
            yield limit
        finally:
            polling.cancel()


def cpu_seconds() -> float:
    """CPU time of this process and all its children, including those that have ended."""
    total = time.process_time()
    process_times = os.times()
    total += process_times.children_user + process_times.children_system
    for process in descendants():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def descendants() -> list[psutil.Process]:
    """Live descendant processes, without zombies. Empty on systems other than Linux."""
    if sys.platform != "linux":
        return []
    running = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running
