"""Rewards of ALFWorld."""

from __future__ import annotations

from typing import Any

from agentfly.environments.alfworld.environment import ALFWorld
from agentfly.scoring import reward


@reward
def alfworld_won(env: ALFWorld) -> dict[str, Any]:
    """1 for a won game, else 0. Metrics: `steps`, and `invalid_actions`, the commands that did nothing."""
    return {"reward": float(env.won), "steps": env.steps, "invalid_actions": env.invalid_actions}


@reward
def alfworld_episode_reward(env: ALFWorld) -> float:
    """10 for a won game, else 0: the scale of the original AgentFly, for comparison with its recipes."""
    return 10.0 * env.won
