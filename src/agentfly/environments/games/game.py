"""What all games have in common: moves, until it is over.

A game that is over stays as it ended: the chain ends there, and whatever is still sent is answered, not carried out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from agentfly.environment import Environment
from agentfly.tooling import tool


class Game(Environment):
    """Something that is played move by move. A subclass calls `begin` in `reset`, and `played` in its tools."""

    scored_by = "game_won"
    most_moves: ClassVar[int] = 100
    """Moves after which it is over."""

    def begin(self) -> None:
        """Nothing has been played yet."""
        self.moves = 0
        """Moves so far."""
        self.score = 0.0
        """What was earned by them, by the game's own count."""
        self.won = False
        self.over = False

    async def played(self, move: Callable[..., Awaitable[str]], *arguments: Any) -> dict[str, Any]:
        """What the model reads of a move, which is made unless the game is over."""
        if self.over:
            said = "The game is over."
        else:
            self.moves += 1
            said = await move(*arguments)
            if self.moves >= self.most_moves and not self.over:
                self.over = True
                said += f"\nThat was move {self.moves}, the last: the game is over."
        return {"observation": said, "won": self.won, "score": self.score, "ends_chain": self.over}


class TextGame(Game):
    """A game of another package: actions in words, observations in words. A subclass says what `_act` does."""

    scored_by = "game_score"
    longest_action: ClassVar[int] = 1000
    """Most characters of an action."""
    seen: str
    """What there is to see now."""

    @tool
    async def act(self, action: str) -> dict[str, Any]:
        """Do one thing in the game. Shows what came of it.

        Args:
            action: What to do, in the words of the game.
        """
        if len(action) > self.longest_action:
            told = f"Error: an action has at most {self.longest_action} characters, not {len(action)}."
            return {"observation": told}
        return await self.played(self._act, action)

    async def _act(self, action: str) -> str:
        """Do it, and say what came of it. Sets `seen`, `score`, `won` and `over`."""
        raise NotImplementedError(f"{type(self).__name__} must say what an action does")

    @tool
    async def look(self) -> str:
        """Show again what there is to see now."""
        return self.seen
