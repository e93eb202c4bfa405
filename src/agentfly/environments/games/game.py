"""Base classes of games: moves until the game is over.

A finished game stays as it ended: the chain ends there, and later moves are answered but not carried out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from agentfly.environment import Environment
from agentfly.tooling import tool


class GameEnvironment(Environment):
    """A game played move by move. A subclass calls `begin` in `reset` and `play` in its tools."""

    scored_by = "game_won"
    max_moves: ClassVar[int] = 100
    """Number of moves after which the game is over."""

    def begin(self) -> None:
        """Reset the counters."""
        self.moves = 0
        """Number of moves so far."""
        self.score = 0.0
        """The game's own score."""
        self.won = False
        self.over = False

    async def play(self, move: Callable[..., Awaitable[str]], *arguments: Any) -> dict[str, Any]:
        """Make a move unless the game is over; returns the tool result."""
        if self.over:
            observation = "The game is over."
        else:
            self.moves += 1
            observation = await move(*arguments)
            if self.moves >= self.max_moves and not self.over:
                self.over = True
                observation += f"\nThat was move {self.moves}, the last: the game is over."
        return {"observation": observation, "won": self.won, "score": self.score, "ends_chain": self.over}


class TextGame(GameEnvironment):
    """A game of another package with text actions and observations. A subclass implements `_act`."""

    scored_by = "game_score"
    max_action_length: ClassVar[int] = 1000
    """Characters."""
    view: str
    """The current observation."""

    @tool
    async def act(self, action: str) -> dict[str, Any]:
        """Do one thing in the game. Shows what came of it.

        Args:
            action: What to do, in the words of the game.
        """
        if len(action) > self.max_action_length:
            error = f"Error: an action has at most {self.max_action_length} characters, not {len(action)}."
            return {"observation": error}
        return await self.play(self._act, action)

    async def _act(self, action: str) -> str:
        """Carry out an action and return the observation. Sets `view`, `score`, `won` and `over`."""
        raise NotImplementedError(f"{type(self).__name__} must implement _act")

    @tool
    async def look(self) -> str:
        """Show again what there is to see now."""
        return self.view
