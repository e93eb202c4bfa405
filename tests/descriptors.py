"""Leaked file descriptors of the test process."""

import asyncio
import os
from contextlib import suppress


def open_descriptors() -> set[tuple[str, str]]:
    """Return the number and the target of every open descriptor of this process."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, as the one of the listing itself
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return descriptors


async def leaked_descriptors(before: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the descriptors that are open now and were not before, once there are none or after 20 s.

    Other parts of the process may open and close descriptors at any time: a leak is what stays.
    """
    for _ in range(400):
        if not (leaked := open_descriptors() - before):
            break
        await asyncio.sleep(0.05)
    return leaked
