"""Rewards for games: whether one was won, or what it counted."""

from __future__ import annotations

from typing import Any

from agentfly.environments.games import Game
from agentfly.scoring import reward


@reward
def game_won(env: Game) -> dict[str, Any]:
    """One where the game was won, else zero; with the moves, and the game's own score."""
    return {"reward": float(env.won), "moves": env.moves, "score": env.score}


@reward
def game_score(env: Game) -> dict[str, Any]:
    """What the game itself counted, which may be below zero or above one; with the moves, and whether it was won."""
    return {"reward": env.score, "moves": env.moves, "won": float(env.won)}
