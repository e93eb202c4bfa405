"""Tasks sampled from a seed, each in one split only.

The content of a task decides its split, by a hash. No two splits share a task, whatever the seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any

from agentfly.environments.data import validate_count, validate_split
from agentfly.errors import DataError

TENTHS = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
"""Tenths of all tasks in each split."""
_MAX_REJECTED = 2000
"""Consecutive draws without a new task after which sampling gives up."""


def belongs_to(content: str, split: str) -> bool:
    """Whether a task with this content is in the split."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 10 in TENTHS[split]


def sample_tasks(
    name: str,
    split: str,
    count: int,
    seed: int,
    draw: Callable[[Random, int], tuple[str, dict[str, Any]] | None],
    *,
    allow_repeats: bool = False,
) -> list[dict[str, Any]]:
    """Sample rows of a split. A larger `count` begins with the same rows.

    Args:
        name: The environment's name, part of the ids.
        split: `train`, `validation` or `test`.
        count: Number of rows.
        seed: Seed of the random numbers.
        draw: Draws the row of a number: its content, a text that no other task has, and its columns. It is called
            again if it returns None, or content of another split or of an earlier row.
        allow_repeats: Whether rows may have the same content.
    """
    validate_split(split)
    validate_count(count)
    random = Random(f"{name} {split} {seed}")
    rows, known = list[dict[str, Any]](), set[str]()
    rejected = 0
    while len(rows) < count:
        content, columns = draw(random, len(rows)) or ("", {})
        if columns and belongs_to(content, split) and (allow_repeats or content not in known):
            known.add(content)
            rows.append({"id": f"{name}/{split}/{seed}/{len(rows)}", **columns})
            rejected = 0
        elif (rejected := rejected + 1) >= _MAX_REJECTED:
            raise DataError(f"there are {len(rows)} {split} tasks of {name} or little more, not {count}")
    return rows
