"""The environment of `agentfly.models.lookup`: one tool that returns one fact per call."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from random import Random
from typing import Any

from agentfly.environment import Environment
from agentfly.environments.data import validate_count, validate_split
from agentfly.models.lookup import draw, find_fact
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

HELD_OUT = ("validation", "test")


class Lookup(Environment):
    """Facts about people, one per call: what is the color of the friend of Fotem?"""

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Draw tasks of a split; the seed determines them. Held-out tasks are about people of no training task."""
        validate_split(split)
        validate_count(count)
        random = Random(seed)
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            row = draw(random, held_out=split != "train")
            # The content of a task decides between validation and test, so no seed draws a task of both.
            if split == "train" or HELD_OUT[zlib.crc32(json.dumps(row).encode()) % 2] == split:
                rows.append({"id": f"{split}-{seed}-{len(rows)}", **row})
        return rows

    async def reset(self, task: Task) -> None:
        self.facts: Mapping[str, Mapping[str, str]] = task.columns["facts"]
        self.columns = task.columns
        self.lookups: set[tuple[str, str]] = set()

    @tool
    async def lookup(self, who: str, what: str) -> str:
        """Look up one fact about a person.

        Args:
            who: The person's name.
            what: A relation or a property.
        """
        self.lookups.add((who, what))
        return find_fact(self.facts, who, what)

    async def snapshot(self) -> list[list[str]]:
        """The lookups so far."""
        return sorted(map(list, self.lookups))

    async def restore(self, state: list[list[str]]) -> None:
        """Continue after these lookups."""
        self.lookups = {(who, what) for who, what in state}

    def expert(self) -> ToolCall | str:
        """Look up the related person, then that person's attribute, then answer."""
        who, relation, attribute = (self.columns[name] for name in ("who", "relation", "attribute"))
        other = find_fact(self.facts, who, relation)
        for subject, what in ((who, relation), (other, attribute)):
            if (subject, what) not in self.lookups:
                return ToolCall("lookup", {"who": subject, "what": what})
        return find_fact(self.facts, other, attribute)
