"""Problems without end, drawn by a seed.

Which split a problem belongs to is decided by its program, numbers included: whatever the seeds and whoever it is
about, no problem is in two.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from random import Random
from typing import Any

from agentfly.environments.math.problems import kinds_of
from agentfly.environments.task_sampling import drawn
from agentfly.errors import DataError

LEVELS = (1, 2, 3)


def draw_tasks(split: str, count: int, seed: int, levels: Sequence[int]) -> list[dict[str, Any]]:
    """So many problems of a split: rows with `id`, `question`, `answer`, `level` and, for the expert, `program`."""
    if isinstance(levels, int) or not levels or any(level not in LEVELS for level in levels):
        raise DataError(
            f"problems have the levels {', '.join(map(str, LEVELS))}, not {levels!r:.80}; give a list of these"
        )

    def draw(random: Random, number: int) -> tuple[str, dict[str, Any]]:
        level = levels[number % len(levels)]
        question, program = random.choice(kinds_of(level)).draw(random)
        return program, {"question": question, "answer": computed(program), "level": level, "program": program}

    return drawn("math", split, count, seed, draw)


def computed(program: str) -> str:
    """What a program of ours comes to: the value of its last line."""
    tree = ast.parse(program)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(tree, "<program>", "exec"), names)
    return str(eval(compile(ast.Expression(last.value), "<program>", "eval"), names))
