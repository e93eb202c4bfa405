"""Rewards for repaired packages: whether the hidden tests pass that failed, and still pass that passed.

They have no time limit of their own: the judge keeps one for each package, and waiting for a turn is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentfly.environments.repair import Repair, RepairJudge
from agentfly.errors import DataError
from agentfly.scoring import reward
from agentfly.types import Task


@reward(timeout=None)
async def repaired(
    env: Repair, judge: RepairJudge, task: Task, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> dict[str, Any]:
    """One where every hidden test passes that should, else zero."""
    mended, kept = await _parts(env, judge, task, fail_to_pass, pass_to_pass)
    return {"reward": float(mended == kept == 1), "fail_to_pass": mended, "pass_to_pass": kept}


@reward(timeout=None)
async def tests_pass(
    env: Repair, judge: RepairJudge, task: Task, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> dict[str, Any]:
    """The part of the hidden tests that failed and now pass; zero where another broke, and where nothing was done."""
    mended, kept = await _parts(env, judge, task, fail_to_pass, pass_to_pass)
    return {"reward": mended if kept == 1 else 0.0, "fail_to_pass": mended, "pass_to_pass": kept}


async def _parts(
    env: Repair, judge: RepairJudge, task: Task, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> tuple[float, float]:
    if isinstance(fail_to_pass, str) or isinstance(pass_to_pass, str):
        raise DataError("the columns 'fail_to_pass' and 'pass_to_pass' must be lists of tests, not texts")
    if not fail_to_pass:
        raise DataError("the column 'fail_to_pass' names no test: there is nothing to repair")
    passed = await judge.passing_tests(task.columns, await env.sources())
    mended, kept = (sum(test in passed for test in tests) for tests in (fail_to_pass, pass_to_pass))
    return mended / len(fail_to_pass), kept / len(pass_to_pass) if pass_to_pass else 1.0
