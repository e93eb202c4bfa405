"""Rewards of games."""

from __future__ import annotations

from typing import Any

from agentfly.environments.games.game import GameEnvironment
from agentfly.environments.games.reasoning_gym import score_answer
from agentfly.rewards.answers import extract_answer
from agentfly.scoring import reward
from agentfly.types import Task


@reward
def game_won(env: GameEnvironment) -> dict[str, Any]:
    """1 for a won game, else 0. Metrics: `moves`, and `score`, the game's own."""
    return {"reward": float(env.won), "moves": env.moves, "score": env.score}


@reward
def game_score(env: GameEnvironment) -> dict[str, Any]:
    """The game's own score, which may be negative or above 1. Metrics: `moves` and `won`."""
    return {"reward": env.score, "moves": env.moves, "won": float(env.won)}


@reward(timeout=60)
def reasoning_gym_score(prediction: str, task: Task) -> dict[str, Any]:
    """Reasoning-gym's score of the answer, 0 to 1. Metric: `solved` (the full score).

    The answer is the last `<answer>…</answer>` of the final reply, or the whole reply without one.
    """
    score = score_answer(task.columns, extract_answer(prediction))
    return {"reward": score, "solved": float(score >= 1)}
