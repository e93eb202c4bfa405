"""Rewards for the household: whether the task was done."""

from __future__ import annotations

from typing import Any

from agentfly.environments.alfworld import ALFWorld
from agentfly.scoring import reward


@reward
def alfworld_won(env: ALFWorld) -> dict[str, Any]:
    """One where the task was done, else zero; with the number of commands, and of those that did nothing."""
    return {"reward": float(env.won), "steps": env.steps, "in_vain": env.in_vain}


@reward
def alfworld_episode_reward(env: ALFWorld) -> float:
    """Ten where the task was done, else zero: the scale of earlier AgentFly recipes, which it keeps comparable."""
    return 10.0 * env.won
