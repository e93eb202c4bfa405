"""Rewards of ScienceWorld: how far the task was got.

The simulator counts a wrong choice, after which the task cannot be done, as -100. Here it is worth nothing: what had
been earned before is lost.
"""

from __future__ import annotations

from typing import Any

from agentfly.environments.scienceworld import ScienceWorld
from agentfly.scoring import reward
from agentfly.trajectory import Trajectory


@reward
def scienceworld_score(env: ScienceWorld) -> dict[str, Any]:
    """The score at the end, from 0 to 1; 0 where the task can no longer be done.

    Beside it: `success`, whether it is 1, `failed`, whether it can no longer be done, the number of `steps`, and of
    those that were not understood (`in_vain`).
    """
    return {
        "reward": _worth(env.score),
        "success": float(env.score == 100),
        "failed": float(env.score < 0),
        "steps": env.steps,
        "in_vain": env.in_vain,
    }


@reward
def scienceworld_progress(trajectory: Trajectory) -> list[float]:
    """The same, told turn by turn: by how much each turn raised the score, or lowered it."""
    gains, before = [], 0.0
    for turn in trajectory.turns:
        after = before
        for call in turn.calls:
            if call.name == "scienceworld_step" and "score" in call.info:
                after = _worth(call.info["score"])
        gains.append(after - before)
        before = after
    return gains


@reward
def scienceworld_episode_reward(env: ScienceWorld) -> float:
    """Ten where the task was done, else zero: the scale of earlier AgentFly recipes, which it keeps comparable."""
    return 10.0 * (env.score == 100)


def _worth(score: int) -> float:
    return max(score, 0) / 100
