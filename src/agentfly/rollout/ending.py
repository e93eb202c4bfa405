"""How a chain ends: whatever is raised becomes a typed end, and what was done is scored."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import replace
from pathlib import Path

from agentfly.errors import BackendFault, EnvironmentFault, RewardFault, describe
from agentfly.outcome import Failure, FailureKind, StopReason, Treatment
from agentfly.resources import Leases
from agentfly.rollout.policy import FailurePolicy
from agentfly.scoring import Scorer
from agentfly.tooling import Context
from agentfly.trajectory import Trajectory

_UNSCORED = {FailureKind.ENVIRONMENT, FailureKind.BACKEND, FailureKind.AGENT, FailureKind.CANCELLED}
"""Ends at which there is nothing of the model's to score."""


def stop_of(error: BaseException) -> tuple[StopReason, str]:
    """The end that an error makes of a chain, and what happened, in words."""
    if isinstance(error, EnvironmentFault):
        return StopReason.ENVIRONMENT_FAULT, str(error)
    if isinstance(error, BackendFault):
        return StopReason.BACKEND_FAULT, str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return StopReason.AGENT_FAULT, f"{describe(error)}{place}"


def cancelled_from_outside() -> bool:
    """Whether this task itself was cancelled, and did not merely await something that was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def scored(
    trajectory: Trajectory, scorer: Scorer | None, context: Context, leases: Leases, policy: FailurePolicy
) -> Trajectory:
    """The trajectory with what it earned; without, where there is no reward, none worked, or the world died first."""
    if scorer is None or trajectory.stop.failure in _UNSCORED:
        return trajectory
    if trajectory.stop is StopReason.TIMEOUT and trajectory.treatment is not Treatment.TRAIN:
        return trajectory  # its world may still be busy with the last action: ask it only where the answer counts
    failures, turn, attempt = list(trajectory.failures), len(trajectory.turns), trajectory.attempts - 1
    for _ in range(policy.retries + 1):
        try:
            score = await scorer.score(trajectory, context, leases)
        except RewardFault as error:
            failures.append(Failure(FailureKind.REWARD, str(error), turn, attempt))
        except EnvironmentFault as error:
            failures.append(Failure(FailureKind.ENVIRONMENT, str(error), turn, attempt))
            return _unscored(trajectory, failures, policy.environment, StopReason.ENVIRONMENT_FAULT)
        else:
            return replace(trajectory, score=score, failures=tuple(failures))
    return _unscored(trajectory, failures, policy.reward, trajectory.stop)


def _unscored(trajectory: Trajectory, failures: list[Failure], treatment: Treatment, stop: StopReason) -> Trajectory:
    """What had failed already keeps its end, and what had not to be trained keeps its treatment."""
    return replace(
        trajectory,
        failures=tuple(failures),
        stop=trajectory.stop if trajectory.stop.failure is not None else stop,
        treatment=treatment if trajectory.treatment is Treatment.TRAIN else trajectory.treatment,
    )
