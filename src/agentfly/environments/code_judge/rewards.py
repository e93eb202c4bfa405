"""Rewards for code: the fraction of unit tests that pass, or of inputs for which a program prints the expected output.

They have no time limit of their own: the judge limits the time of each solution, and waiting for the judge is not
counted.
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
_MAX_FAILURES = 5


@reward(timeout=None)
async def unit_tests(
    prediction: str,
    tests: str | Sequence[str],
    judge: CodeJudge,
    setup: str | None = None,
    entry_point: str | None = None,
) -> dict[str, Any]:
    """The fraction of the column `tests` that the code in the reply passes."""
    verdict = await judge.unit_tests(extract_code(prediction), tests, setup=setup or "", entry_point=entry_point)
    return _build_score(verdict)


@reward(timeout=None)
async def output_match(
    prediction: str,
    cases: Sequence[Mapping[str, str]],
    judge: CodeJudge,
    match: str = "words",
    tolerance: float = 1e-6,
) -> dict[str, Any]:
    """The fraction of the column `cases`, each with `stdin` and `expected`, whose expected output the program prints.

    `match`: `exact`; `words`, white space is ignored; `numbers`, words that are numbers may differ by the `tolerance`,
    absolute or relative.
    """
    if match not in _MATCHES:
        raise DataError(f"match is one of {', '.join(_MATCHES)}, not {match!r}")
    if not isinstance(cases, Sequence) or isinstance(cases, str) or not cases:
        raise DataError(f"cases must be a list of at least one case with stdin and expected, not {cases!r:.80}")
    for number, case in enumerate(cases):
        texts = [case.get("stdin", ""), case.get("expected")] if isinstance(case, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"cases[{number}] must have the texts stdin and expected, not {case!r:.80}")
    program = extract_code(prediction)
    try:
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(judge.run_program(program, case.get("stdin", ""))) for case in cases]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first one, which cancelled the others
    failures = []
    for number, (case, run) in enumerate(zip(cases, runs, strict=True)):
        output = run.result()
        if output.error:
            failures.append(f"cases[{number}]: {output.error}")
        elif not _is_match(output.text, case["expected"], match, tolerance):
            failures.append(f"cases[{number}]: it printed {output.text!r:.100}")
    return _build_score(Verdict(len(cases) - len(failures), len(cases), tuple(failures)))


def extract_code(prediction: str) -> str:
    """Return the last block of Python in a reply, else the last block of any language, else the whole reply."""
    blocks = _FENCE.findall(prediction)
    python = [code for language, code in blocks if language.lower() in _PYTHON]
    return str((python or [code for _, code in blocks] or [prediction])[-1])


def _build_score(verdict: Verdict) -> dict[str, Any]:
    return {
        "reward": verdict.rate,
        "passed": verdict.passed,
        "total": verdict.total,
        "all_passed": float(verdict.passed == verdict.total),
        "wrong": list(verdict.failures[:_MAX_FAILURES]),
    }


def _is_match(printed: str, expected: str, match: str, tolerance: float) -> bool:
    if match == "exact":
        return printed == expected
    ours, theirs = printed.split(), expected.split()
    if match == "words" or len(ours) != len(theirs):
        return ours == theirs
    for our, their in zip(ours, theirs, strict=True):
        if our == their:
            continue
        try:
            # float() accepts 1_000, which no program prints for a number
            is_close = "_" not in our and math.isclose(float(our), float(their), rel_tol=tolerance, abs_tol=tolerance)
        except ValueError:
            is_close = False
        if not is_close:
            return False
    return True
