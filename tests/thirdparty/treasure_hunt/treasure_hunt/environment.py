"""A treasure in one of sixteen places."""

from __future__ import annotations

import zlib
from random import Random
from typing import Any

from agentfly import Environment, Task, tool
from agentfly.errors import DataError
from agentfly.types import ToolCall

PLACES = 16
DIGS = 5
SPLITS = ("train", "validation", "test")


class TreasureHunt(Environment):
    """A buried treasure to dig for."""

    scored_by = "treasure_found"

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Draw tasks of a split; the seed determines them."""
        if split not in SPLITS:
            raise DataError(f"there is no split {split!r}; there are {', '.join(SPLITS)}")
        random = Random(f"{split} {seed}")
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            first = random.randrange(1000)
            treasure = first + random.randrange(PLACES)
            if SPLITS[max(zlib.crc32(f"{first} {treasure}".encode()) % 10 - 7, 0)] == split:
                question = f"A treasure is buried at one of the places {first} to {first + PLACES - 1}. Dig it up."
                row_id = f"{split}-{seed}-{len(rows)}"
                rows.append({"id": row_id, "question": question, "first": first, "treasure": treasure})
        return rows

    async def reset(self, task: Task) -> None:
        """Bury the treasure of the task."""
        self.treasure: int = task.columns["treasure"]
        self.low: int = task.columns["first"]
        self.high = self.low + PLACES - 1
        self.digs = 0
        self.found = False

    @tool
    async def dig(self, place: int) -> dict[str, Any]:
        """Dig at a place. Returns whether the treasure is there, further up or further down.

        Args:
            place: The number of the place.
        """
        if self.found or self.digs == DIGS:
            return {"observation": "The hunt is over.", "ends_chain": True}
        self.digs += 1
        self.found = place == self.treasure
        if place < self.treasure:
            self.low = max(self.low, place + 1)
        elif place > self.treasure:
            self.high = min(self.high, place - 1)
        where = "here" if self.found else "further up" if place < self.treasure else "further down"
        return {"observation": f"The treasure is {where}.", "ends_chain": self.found or self.digs == DIGS}

    def expert(self) -> ToolCall | str:
        """Dig in the middle of the remaining places."""
        return "Done." if self.found else ToolCall("dig", {"place": (self.low + self.high) // 2})
