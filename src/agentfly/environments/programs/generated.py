"""Functions to write without end, drawn by a seed, each with an example and with tests that are not shown.

Which split a task belongs to is decided by the function that solves it, whatever it is called: no function is asked for
in two splits. What the tests expect differs from test to test, so that a constant earns little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from textwrap import indent
from typing import Any

from agentfly.environments.programs import functions
from agentfly.environments.programs.functions import Function, Pipeline
from agentfly.environments.task_sampling import belongs_to, drawn
from agentfly.errors import DataError

KINDS = tuple(functions.KINDS)
TESTS = 5
"""Hidden tests of a task."""
_TRIES = 20
"""Sets of tests that are tried for one function."""
_NAMES = (
    "answer",
    "apply",
    "calculate",
    "convert",
    "f",
    "find",
    "g",
    "h",
    "process",
    "run",
    "solve",
    "transform",
    "work",
)


def draw_tasks(split: str, count: int, seed: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """So many tasks: rows with `id`, `question`, `kind`, the hidden `tests`, and `solution` and `example`."""
    if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
        raise DataError(f"functions are over {', '.join(KINDS)}, not {kinds!r:.80}; give a list of these")

    def draw(random: Random, number: int) -> tuple[str, dict[str, Any]] | None:
        kind = kinds[number % len(kinds)]
        function = _filled(random.choice(functions.KINDS[kind]), random)
        if not belongs_to(function.body, split):  # before its tests are made, which takes long
            return None
        row = _row(kind, function, random)
        return None if row is None else (function.body, row)

    return drawn("programs", split, count, seed, draw)


def _filled(kind: Pipeline | Function, random: Random) -> Function:
    function = kind.draw(random) if isinstance(kind, Pipeline) else kind
    small = random.randint(2, 9)
    values = {"k": small, "p": random.randint(2, 9), "q": small + random.randint(2, 9), "l": random.randint(2, 4),
              "m": random.randint(4, 6), "c": random.choice("abcdehiklmnorstu")}  # fmt: skip
    statement, body = function.statement, function.body
    for letter, value in values.items():  # not by format: braces in Python mean something else
        statement, body = (text.replace(f"{{{letter}}}", str(value)) for text in (statement, body))
    return replace(function, statement=statement, body=body)


def _row(kind: str, function: Function, random: Random) -> dict[str, Any] | None:
    """The task of writing a function; None where no tests were found that tell it from a constant."""
    name = random.choice(_NAMES)
    solution = f"def {name}({function.parameters}):\n{indent(function.body, '    ')}"
    names: dict[str, Any] = {}
    exec(solution, names)  # our own code
    for _ in range(_TRIES):
        given = [function.arguments(random) for _ in range(TESTS + 1)]
        values = [names[name](*each) for each in given]
        if _tells(given, values):
            calls = [
                f"{name}({', '.join(map(repr, each))}) == {value!r}" for each, value in zip(given, values, strict=True)
            ]
            example, *tests = (f"assert {each}" for each in calls)
            question = f"Write {name}({function.parameters}). {function.statement}\n{example}"
            return {"question": question, "kind": kind, "tests": tests, "solution": solution, "example": example}
    return None


def _tells(given: Sequence[tuple[Any, ...]], values: Sequence[Any]) -> bool:
    """Whether neither a constant nor an argument given back passes more than one of the tests."""
    told = len({repr(each) for each in given}) == len(given) and len({repr(each) for each in values}) == len(values)
    return told and not any(value == each for args, value in zip(given, values, strict=True) for each in args)
