"""The key-value cache: one block of memory, cut into stretches, one for each sequence.

A sequence's keys and values lie side by side, so that attention reads them where they are, without gathering pages.
What is not in use is cut and joined as stretches come and go.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Block:
    """Room for the tokens of one sequence: places `start` to `start + room` of the arena."""

    start: int
    room: int

    @property
    def end(self) -> int:
        return self.start + self.room


class KVCache:
    """Places for keys and values of so many tokens, in every layer."""

    def __init__(self, capacity: int, data: torch.Tensor) -> None:
        self.capacity = capacity
        self.data = data
        """[layer, key or value, place, head, width]; empty where the keys and values are kept by somebody else.

        All of it is finite, also what belongs to nobody: it may be read, and then counts for nothing.
        """
        self._free = [Block(0, capacity)]
        """In order, no two of them neighbours."""

    @property
    def free(self) -> int:
        """Places that belong to nobody."""
        return sum(each.room for each in self._free)

    def take(self, room: int) -> Block | None:
        """A stretch of that size from the smallest hole it fits in; None where there is no such hole."""
        fitting = [hole for hole in self._free if hole.room >= room]
        if not fitting:
            return None
        hole = min(fitting, key=lambda each: each.room)
        taken = Block(hole.start, room)
        hole.start, hole.room = hole.start + room, hole.room - room
        if not hole.room:
            self._free.remove(hole)
        return taken

    def give(self, stretch: Block) -> None:
        """Take a stretch back, and join it with what is free beside it."""
        at = bisect.bisect(self._free, stretch.start, key=lambda each: each.start)
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        start, end = stretch.start, stretch.end
        if after is not None and after.start == end:
            end = after.end
            del self._free[at]
        if before is not None and before.end == start:
            start = before.start
            del self._free[at - 1]
            at -= 1
        self._free.insert(at, Block(start, end - start))

    def grow(self, stretch: Block, room: int) -> bool:
        """Make a stretch larger where it lies, if what comes behind it is free."""
        at = bisect.bisect(self._free, stretch.start, key=lambda each: each.start)
        hole = self._free[at] if at < len(self._free) else None
        missing = room - stretch.room
        if missing <= 0:
            return True
        if hole is None or hole.start != stretch.end or hole.room < missing:
            return False
        hole.start, hole.room = hole.start + missing, hole.room - missing
        if not hole.room:
            del self._free[at]
        stretch.room = room
        return True

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` tokens' keys and values, in all layers, to places that do not overlap."""
        if self.data.numel():
            self.data[:, :, target : target + count] = self.data[:, :, source : source + count]

    def wipe(self) -> None:
        """Forget what is no number, wherever it lies."""
        self.data.zero_()
