"""Tasks drawn from a seed, each in one split only.

What a task is about decides its split, by a checksum; so no two splits share a task, whatever the seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any

from agentfly.environments.data import checked_count, checked_split
from agentfly.errors import DataError

TENTHS = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
"""Which tenths of all tasks are in each split."""
_PATIENCE = 2000
"""Draws without a task that was not there already, after which there are hardly more."""


def belongs_to(content: str, split: str) -> bool:
    """Whether a task that is about this is in the split."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 10 in TENTHS[split]


def drawn(
    name: str,
    split: str,
    count: int,
    seed: int,
    draw: Callable[[Random, int], tuple[str, dict[str, Any]] | None],
    *,
    again: bool = False,
) -> list[dict[str, Any]]:
    """So many rows of a split, no two about the same unless `again`; more begin with fewer.

    `draw` makes the row of a number: what it is about, in words that only the same task has, and its columns. It may
    be asked for a number again, since None, and what is not of the split, is a draw in vain.
    """
    checked_split(split)
    checked_count(count)
    random, in_vain = Random(f"{name} {split} {seed}"), 0
    rows, known = list[dict[str, Any]](), set[str]()
    while len(rows) < count:
        content, columns = draw(random, len(rows)) or ("", {})
        if columns and belongs_to(content, split) and (again or content not in known):
            known.add(content)
            rows.append({"id": f"{name}/{split}/{seed}/{len(rows)}", **columns})
            in_vain = 0
        elif (in_vain := in_vain + 1) >= _PATIENCE:
            raise DataError(f"there are {len(rows)} {split} tasks of {name} or little more, not {count}")
    return rows
