"""Problems without end, drawn by a seed.

Which split a problem belongs to is decided by its program, numbers included: whatever the seeds and whoever it is
about, no problem is in two.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from agentfly.environments.data import checked_split
from agentfly.environments.math.problems import kinds_of
from agentfly.errors import DataError

LEVELS = (1, 2, 3)
SPLITS = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
"""Which tenths of all problems are in each."""


def draw_tasks(split: str, count: int, seed: int, levels: Sequence[int]) -> list[dict[str, Any]]:
    """So many problems of a split: rows with `id`, `question`, `answer`, `level` and, for the expert, `program`."""
    checked_split(split)
    if isinstance(levels, int) or not levels or any(level not in LEVELS for level in levels):
        raise DataError(
            f"problems have the levels {', '.join(map(str, LEVELS))}, not {levels!r:.80}; give a list of these"
        )
    drawn = itertools.islice(_distinct(split, seed, levels), count)
    return [
        {"id": f"{split}-{seed}-{number}", "question": question, "answer": computed(program), "level": level,
         "program": program}
        for number, (level, question, program) in enumerate(drawn)
    ]  # fmt: skip


def _distinct(split: str, seed: int, levels: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    random, seen = Random(f"{split}/{seed}"), set[str]()
    for level in itertools.cycle(levels):
        while True:
            question, program = random.choice(kinds_of(level)).draw(random)
            if tenth_of(program) in SPLITS[split] and program not in seen:
                break
        seen.add(program)
        yield level, question, program


def tenth_of(program: str) -> int:
    """A number from 0 to 9 that is always the same for the same program."""
    return hashlib.sha256(program.encode()).digest()[0] * 10 // 256


def computed(program: str) -> str:
    """What a program of ours comes to: the value of its last line."""
    tree = ast.parse(program)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(tree, "<program>", "exec"), names)
    return str(eval(compile(ast.Expression(last.value), "<program>", "eval"), names))
