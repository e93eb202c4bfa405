"""What all games have in common: moves, until it is over.

A game that is over stays as it ended: the chain ends there, and whatever is still sent is answered, not carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from agentfly.environment import Environment


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

    def played(self, move: Callable[[], str]) -> dict[str, Any]:
        """What the model reads of a move, which is made unless the game is over."""
        if self.over:
            return self.told("The game is over.")
        self.moves += 1
        said = move()
        if self.moves >= self.most_moves and not self.over:
            self.over = True
            said += f"\nThat was move {self.moves}, the last: the game is over."
        return self.told(said)

    def told(self, said: str) -> dict[str, Any]:
        """An observation, with how things stand."""
        return {"observation": said, "won": self.won, "score": self.score, "ends_chain": self.over}
