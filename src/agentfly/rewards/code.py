"""Rewards for code: the part of the unit tests it passes, or of the cases in which it prints what it should.

They have no time limit of their own: the judge keeps one for each solution, and waiting for a turn is nobody's fault.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.environments.code_judge import CodeJudge, Verdict
from agentfly.errors import DataError
from agentfly.scoring import reward

_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "python3", "py")
_MATCHES = ("exact", "words", "numbers")
_TOLD = 5


@reward(timeout=None)
async def unit_tests(
    prediction: str,
    tests: str | Sequence[str],
    judge: CodeJudge,
    setup: str | None = None,
    entry_point: str | None = None,
) -> dict[str, Any]:
    """The part of the column `tests` that the code in the answer passes."""
    verdict = await judge.unit_tests(code_in(prediction), tests, setup=setup or "", entry_point=entry_point)
    return _scored(verdict)


@reward(timeout=None)
async def output_match(
    prediction: str,
    cases: Sequence[Mapping[str, str]],
    judge: CodeJudge,
    match: str = "words",
    tolerance: float = 1e-6,
) -> dict[str, Any]:
    """The part of the column `cases` (each with `stdin` and `expected`) in which the program prints what is expected.

    `match`: `exact`; `words`, white space does not count; `numbers`, a word that is a number may be off by the
    `tolerance`, absolute or relative.
    """
    if match not in _MATCHES:
        raise DataError(f"match is one of {', '.join(_MATCHES)}, not {match!r}")
    program = code_in(prediction)
    read = [_read_case(case, number) for number, case in enumerate(_some(cases))]
    try:
        async with asyncio.TaskGroup() as running:
            runs = [running.create_task(judge.run_program(program, stdin)) for stdin, _ in read]
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first to fail, which ended the others
    failures = []
    for number, ((_, expected), run) in enumerate(zip(read, runs, strict=True)):
        printed = run.result()
        if printed.error:
            failures.append(f"cases[{number}]: {printed.error}")
        elif not _is_match(printed.text, expected, match, tolerance):
            failures.append(f"cases[{number}]: it printed {printed.text!r:.100}")
    return _scored(Verdict(len(read) - len(failures), len(read), tuple(failures)))


def code_in(prediction: str) -> str:
    """The last block of Python in an answer, else the last block of anything, else all of it."""
    blocks = _FENCE.findall(prediction)
    python = [code for language, code in blocks if language.lower() in _PYTHON]
    return str((python or [code for _, code in blocks] or [prediction])[-1])


def _scored(verdict: Verdict) -> dict[str, Any]:
    return {
        "reward": verdict.rate,
        "passed": verdict.passed,
        "total": verdict.total,
        "all_passed": float(verdict.passed == verdict.total),
        "wrong": list(verdict.failures[:_TOLD]),
    }


def _some(cases: Any) -> Sequence[Any]:
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise DataError(f"cases must be a list of at least one case with stdin and expected, not {cases!r:.80}")
    return cases


def _read_case(case: Any, number: int) -> tuple[str, str]:
    stdin, expected = (case.get("stdin", ""), case.get("expected")) if isinstance(case, Mapping) else (None, None)
    if not isinstance(stdin, str) or not isinstance(expected, str):
        raise DataError(f"cases[{number}] must have the texts stdin and expected, not {case!r:.80}")
    return stdin, expected


def _is_match(printed: str, expected: str, match: str, tolerance: float) -> bool:
    if match == "exact":
        return printed == expected
    ours, theirs = printed.split(), expected.split()
    if match == "words" or len(ours) != len(theirs):
        return ours == theirs
    return all(a == b or _is_close(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _is_close(ours: str, theirs: str, tolerance: float) -> bool:
    try:
        return "_" not in ours and math.isclose(float(ours), float(theirs), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False
