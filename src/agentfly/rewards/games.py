"""Rewards for games: whether one was won, what it counted, and what reasoning-gym gives for an answer."""

from __future__ import annotations

from typing import Any

from agentfly.environments.games import Game
from agentfly.environments.games.reasoning_gym import score
from agentfly.rewards.answers import answer_in
from agentfly.scoring import reward
from agentfly.types import Task


@reward
def game_won(env: Game) -> dict[str, Any]:
    """One where the game was won, else zero; with the moves, and the game's own score."""
    return {"reward": float(env.won), "moves": env.moves, "score": env.score}


@reward
def game_score(env: Game) -> dict[str, Any]:
    """What the game itself counted, which may be below zero or above one; with the moves, and whether it was won."""
    return {"reward": env.score, "moves": env.moves, "won": float(env.won)}


@reward(timeout=60)
def reasoning_gym_score(prediction: str, task: Task) -> dict[str, Any]:
    """What the question's own scorer gives for the answer, from 0 to 1; and whether that is full marks.

    The answer is the last `<answer>…</answer>` of the final reply, or all of it where it has none.
    """
    earned = score(task.columns, answer_in(prediction))
    return {"reward": earned, "solved": float(earned >= 1)}
