"""Rewards of ScienceWorld, from the simulator's score.

The simulator scores a task that has failed for good as -100. The rewards count it as 0: progress made before is lost.
"""

from __future__ import annotations

from typing import Any

from agentfly.environments.scienceworld.environment import ScienceWorld
from agentfly.scoring import reward
from agentfly.trajectory import Trajectory


@reward
def scienceworld_score(env: ScienceWorld) -> dict[str, Any]:
    """Final score, 0 to 1; 0 if the task has failed for good.

    Metrics: `success` (the score is 1), `failed` (for good), the number of `steps`, and of `invalid_actions` that the
    simulator could not parse.
    """
    return {
        "reward": max(env.score, 0) / 100,
        "success": float(env.score == 100),
        "failed": float(env.score < 0),
        "steps": env.steps,
        "invalid_actions": env.invalid_actions,
    }


@reward
def scienceworld_progress(trajectory: Trajectory) -> list[float]:
    """Change of the score (0 to 1) per turn; the sum is `scienceworld_score`."""
    gains = []
    before = 0.0
    for turn in trajectory.turns:
        after = before
        for call in turn.calls:
            if call.name == "scienceworld_step" and "score" in call.info:
                after = max(call.info["score"], 0) / 100
        gains.append(after - before)
        before = after
    return gains


@reward
def scienceworld_episode_reward(env: ScienceWorld) -> float:
    """10 for a completed task, else 0: the scale of the original AgentFly, for comparison with its recipes."""
    return 10.0 * (env.score == 100)
