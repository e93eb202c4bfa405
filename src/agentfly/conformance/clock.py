"""Time limits in CPU time, so that a loaded machine does not fail a sound environment.

A limit of n seconds is exceeded when n seconds have passed and this process and its children have used more than n
seconds of CPU time; or, whatever they used, when `WALL` times n seconds have passed: then something hangs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

WALL = 5.0
"""Wall-clock seconds for each second of a limit."""
_POLL = 0.05


class Stopwatch:
    """CPU time and wall-clock time since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = cpu_seconds(), time.monotonic()

    def exceeds(self, seconds: float) -> bool:
        """Whether more time has passed than a limit allows."""
        wall = time.monotonic() - self._wall
        if wall <= seconds:
            return False
        return wall > WALL * seconds or cpu_seconds() - self._cpu > seconds


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, by a stopwatch: raises TimeoutError."""
    watch = Stopwatch()

    async def guard(limit: asyncio.Timeout) -> None:
        await asyncio.sleep(seconds)
        while not watch.exceeds(seconds):  # noqa: ASYNC110  (no event tells of CPU time)
            await asyncio.sleep(max(_POLL, seconds / 100))
        limit.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as limit:
        watching = asyncio.create_task(guard(limit))
        try:
            yield limit
        finally:
            watching.cancel()


def cpu_seconds() -> float:
    """CPU time of this process and of all its children, those that have ended too."""
    ticks = os.sysconf("SC_CLK_TCK")
    # utime, stime, cutime and cstime of /proc/PID/stat, counted from the state
    running = sum(sum(map(int, words[11:15])) for _, words in descendants()) / ticks
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + running


def descendants() -> Iterator[tuple[int, list[str]]]:
    """The live processes below this one: their ids, and /proc/PID/stat from the state on. None without a /proc."""
    if sys.platform != "linux":
        return
    below: dict[int, list[tuple[int, list[str]]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if words[0] != "Z":
            below.setdefault(int(words[1]), []).append((int(stat.parent.name), words))
    waiting = [os.getpid()]
    for parent in waiting:
        for child, words in below.get(parent, []):
            waiting.append(child)
            yield child, words
