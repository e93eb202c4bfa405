"""Base classes of games, moves until the game is over, and the grid that some are played on.

A finished game stays as it ended: the chain ends there, and later moves are answered but not carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from agentfly.environment import Environment
from agentfly.errors import DataError
from agentfly.rewards.answers import extract_answer
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Task

Direction = Literal["up", "down", "left", "right"]
Place = tuple[int, int]
"""Row and column, from the top left."""
OFFSETS: dict[Direction, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MAX_SIZE = 64
"""Maximum number of rows and of columns of a grid in a task."""


class GameEnvironment(Environment):
    """A game played move by move. A subclass implements `_act`, calls `begin` in `reset`, and `play` in its tools."""

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

    async def play(self, action: Any) -> dict[str, Any]:
        """Carry out an action unless the game is over; returns the tool result."""
        if self.over:
            observation = "The game is over."
        else:
            self.moves += 1
            observation = await self._act(action)
            if self.moves >= self.max_moves and not self.over:
                self.over = True
                observation += f"\nThat was move {self.moves}, the last: the game is over."
        return {"observation": observation, "won": self.won, "score": self.score, "ends_chain": self.over}

    async def _act(self, action: Any) -> str:
        """Carry out an action and return the observation. Sets `score`, `won` and `over`."""
        raise NotImplementedError(f"{type(self).__name__} must implement _act")


class TextGame(GameEnvironment):
    """A game of another package with text actions and observations. `_act` also sets `view`."""

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
        return await self.play(action)

    @tool
    async def look(self) -> str:
        """Show again what there is to see now."""
        return self.view


def neighbor(cell: Place, direction: Direction) -> Place:
    """The adjacent place in a direction."""
    row, column = OFFSETS[direction]
    return cell[0] + row, cell[1] + column


def distance(start: Place, end: Place) -> int:
    """Number of steps between two places if nothing is in the way."""
    return abs(start[0] - end[0]) + abs(start[1] - end[1])


def describe_offset(start: Place, end: Place) -> str:
    """The way from a place to another in words, such as "2 down and 1 left"; "here" if they are the same."""
    down, right = end[0] - start[0], end[1] - start[1]
    ways = ((down, "down" if down > 0 else "up"), (right, "right" if right > 0 else "left"))
    return " and ".join(f"{abs(steps)} {way}" for steps, way in ways if steps) or "here"


def find_symbols(symbols: str, rows: Sequence[str]) -> list[Place]:
    """The places of any of the symbols."""
    return [(y, x) for y, row in enumerate(rows) for x, symbol in enumerate(row) if symbol in symbols]


def validate_rows(rows: Any, symbols: str, column: str) -> list[str]:
    """The rows of a grid in a task's column. Raises DataError unless they consist of these symbols."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, str) for row in rows):
        raise DataError(f"the column {column!r} must be a list of rows of text, not {rows!r:.80}")
    if not 0 < len(rows) <= MAX_SIZE or not all(len(row) <= MAX_SIZE for row in rows):
        raise DataError(f"the column {column!r} must have 1 to {MAX_SIZE} rows, none longer than {MAX_SIZE}")
    if unknown := sorted({symbol for row in rows for symbol in row} - set(symbols)):
        raise DataError(f"the column {column!r} may contain {symbols!r}; it also has {''.join(unknown)!r:.80}")
    return list(rows)


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
    from agentfly.environments.games.reasoning_gym import score_answer  # the other games do without it

    score = score_answer(task.columns, extract_answer(prediction))
    return {"reward": score, "solved": float(score >= 1)}
