"""Rewards for repaired packages: whether the failing hidden tests pass, and the other ones still pass.

They have no time limit of their own: the judge limits the time of each package, and waiting for the judge is not
counted.
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
    """1 if all hidden tests pass, else 0."""
    fixed, intact = await _pass_rates(env, judge, task, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass)
    return {"reward": float(fixed == intact == 1), "fail_to_pass": fixed, "pass_to_pass": intact}


@reward(timeout=None)
async def tests_pass(
    env: Repair, judge: RepairJudge, task: Task, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> dict[str, Any]:
    """The fraction of the failing hidden tests that pass now; 0 if another test is broken."""
    fixed, intact = await _pass_rates(env, judge, task, fail_to_pass=fail_to_pass, pass_to_pass=pass_to_pass)
    return {"reward": fixed if intact == 1 else 0.0, "fail_to_pass": fixed, "pass_to_pass": intact}


async def _pass_rates(
    env: Repair, judge: RepairJudge, task: Task, *, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]
) -> tuple[float, float]:
    if isinstance(fail_to_pass, str) or isinstance(pass_to_pass, str):
        raise DataError("the columns 'fail_to_pass' and 'pass_to_pass' must be lists of tests, not texts")
    if not fail_to_pass:
        raise DataError("the column 'fail_to_pass' names no test: there is nothing to repair")
    passing = await judge.passing_tests(task.columns, await env.sources())
    fixed, intact = (sum(test in passing for test in tests) for tests in (fail_to_pass, pass_to_pass))
    return fixed / len(fail_to_pass), intact / len(pass_to_pass) if pass_to_pass else 1.0
