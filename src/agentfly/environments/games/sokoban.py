"""Sokoban: push every box onto a goal. Boxes cannot be pulled, so a box in a corner is stuck.

A level that has become unsolvable is not over: the player can keep moving.
"""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

from agentfly.environments.games.game import GameEnvironment
from agentfly.environments.games.grid import Direction, validate_rows
from agentfly.environments.games.sokoban_level import (
    FLOOR,
    SYMBOLS,
    SearchLimitReached,
    SokobanRoom,
    SokobanState,
    draw_level,
    read_level,
    solve,
)
from agentfly.environments.task_sampling import sample_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

QUESTION = "Push every box onto a goal. {}\n{}"
_NAMES = ("wall", "you", "you on a goal", "a box", "a box on a goal", "a goal", "floor")


class Sokoban(GameEnvironment):
    """A warehouse as a grid of symbols: push every box onto a goal."""

    symbols: ClassVar[str] = "#@+$*._"
    """Displayed symbols of wall, player, player on a goal, box, box on a goal, goal and floor."""

    @classmethod
    def draw_tasks(
        cls,
        split: str = "train",
        count: int = 100,
        *,
        seed: int = 0,
        size: int = 6,
        boxes: int = 1,
        shortest: int = 3,
        longest: int = 20,
    ) -> list[dict[str, Any]]:
        """Levels of `size` rows and columns, walls included, whose solutions take `shortest` to `longest` moves."""
        if not 5 <= size <= 10 or not 1 <= boxes <= 3 or not 1 <= shortest <= longest:
            raise ConfigError(
                "a generated level has a size from 5 to 10, 1 to 3 boxes and 1 <= shortest <= longest, "
                f"not size={size!r}, boxes={boxes!r}, shortest={shortest!r}, longest={longest!r}"
            )

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]] | None:
            level = draw_level(random, size, boxes, shortest=shortest, longest=longest)
            if level is None:
                return None
            plain = level[0].render(level[1])
            return plain, {"question": cls.question(*level), "level": plain.split("\n")}

        return sample_tasks("sokoban", split, count, seed, draw)

    @classmethod
    def question(cls, room: SokobanRoom, state: SokobanState) -> str:
        """The prompt: the legend of the symbols and the level."""
        legend = ", ".join(f"{symbol} is {name}" for symbol, name in zip(cls.symbols, _NAMES, strict=True))
        return QUESTION.format(f"{legend}.", room.render(state, cls.symbols))

    async def reset(self, task: Task) -> None:
        """Start the level in the column `level`: rows in the usual symbols."""
        self.begin()
        if "level" not in task.columns:
            raise DataError(f"task {task.id!r} has no column 'level'; Sokoban.draw_tasks makes such rows")
        rows = validate_rows(task.columns["level"], SYMBOLS + FLOOR, "level")
        self._room, self._state = read_level(rows)
        self._solution: dict[SokobanState, Direction] = {}

    @tool
    async def move(self, direction: Direction) -> dict[str, Any]:
        """Take one step, pushing the box that is in the way. Shows the room after it.

        Args:
            direction: Where to go.
        """
        return await self.play(self._step, direction)

    async def _step(self, direction: Direction) -> str:
        after = self._room.move(self._state, direction)
        if after is None:
            return f"The way is blocked.\n{self._room.render(self._state, self.symbols)}"
        self._state = after
        self.won = self.over = self._room.is_goal(after)
        self.score = float(self.won)
        ending = "\nEvery box is on a goal." if self.won else ""
        return self._room.render(after, self.symbols) + ending

    def expert(self) -> ToolCall | str:
        """The next move of a shortest solution; a message if the level has become unsolvable."""
        if self.over:
            return "Done."
        if self._state not in self._solution:
            try:
                self._solution = solve(self._room, self._state) or {}
            except SearchLimitReached:
                raise ConfigError("this level of Sokoban is too large for the expert") from None
        if self._state not in self._solution:
            return "There is no way left."
        return ToolCall("move", {"direction": self._solution[self._state]})
