"""Time limits in CPU time, so that a loaded machine does not fail a sound environment.

A limit of n seconds is exceeded when n seconds have passed and this process and its children have used more than n
seconds of CPU time; or, regardless of CPU time, when `WALL` times n seconds have passed: then something hangs.
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
    ticks = os.sysconf("SC_CLK_TCK")
    # utime, stime, cutime and cstime of /proc/PID/stat, counted from the state field
    running = sum(sum(map(int, fields[11:15])) for _, fields in descendants()) / ticks
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system + running


def descendants() -> Iterator[tuple[int, list[str]]]:
    """Yield live descendant processes: pid, and the fields of /proc/PID/stat from the state on. Empty without /proc."""
    if sys.platform != "linux":
        return
    children: dict[int, list[tuple[int, list[str]]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # the process ended meanwhile
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append((int(stat.parent.name), fields))
    parents = [os.getpid()]
    for parent in parents:
        for child, fields in children.get(parent, []):
            parents.append(child)
            yield child, fields
