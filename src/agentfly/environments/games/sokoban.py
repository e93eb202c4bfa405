"""Sokoban: push every box onto a goal. Boxes cannot be pulled, so a box in a corner is there for good.

A level that can no longer be solved is not over; it is simply lost, as for any player.
"""

from __future__ import annotations

from random import Random
from typing import Any, ClassVar

from agentfly.environments.drawing import drawn
from agentfly.environments.games.game import Game
from agentfly.environments.games.grid import Direction, checked_rows
from agentfly.environments.games.sokoban_level import FLOOR, SIGNS, Position, Room, read_level
from agentfly.environments.games.sokoban_search import TooLarge, draw_level, solution
from agentfly.errors import ConfigError, DataError
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

QUESTION = "Push every box onto a goal. {}\n{}"
_NAMES = ("wall", "you", "you on a goal", "a box", "a box on a goal", "a goal", "floor")


class Sokoban(Game):
    """A warehouse as a grid of signs: push every box onto a goal."""

    signs: ClassVar[str] = "#@+$*._"
    """How the model is shown wall, player, player on a goal, box, box on a goal, goal and floor."""

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
        """Levels in rooms of `size` rows and columns, walls included, which take `shortest` to `longest` moves."""
        if not 5 <= size <= 10 or not 1 <= boxes <= 3 or not 1 <= shortest <= longest:
            raise ConfigError(
                "a drawn level has a size from 5 to 10, 1 to 3 boxes and 1 <= shortest <= longest, "
                f"not size={size!r}, boxes={boxes!r}, shortest={shortest!r}, longest={longest!r}"
            )

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]] | None:
            level = draw_level(random, size, boxes, shortest, longest)
            if level is None:
                return None
            plain = level[0].shown(level[1])
            return plain, {"question": cls.question(*level), "level": plain.split("\n")}

        return drawn("sokoban", split, count, seed, draw)

    @classmethod
    def question(cls, room: Room, position: Position) -> str:
        """What the model is asked, with the level and what its signs mean."""
        legend = ", ".join(f"{sign} is {name}" for sign, name in zip(cls.signs, _NAMES, strict=True))
        return QUESTION.format(f"{legend}.", room.shown(position, cls.signs))

    async def reset(self, task: Task) -> None:
        """Begin the level of the column `level`: rows in the usual signs."""
        self.begin()
        if "level" not in task.columns:
            raise DataError(f"task {task.id!r} has no column 'level'; Sokoban.draw_tasks makes such rows")
        rows = checked_rows(task.columns["level"], SIGNS + FLOOR, "level")
        self._room, self._position = read_level(rows)
        self._way: dict[Position, Direction] = {}

    @tool
    async def move(self, direction: Direction) -> dict[str, Any]:
        """Take one step, pushing the box that is in the way. Shows the room after it.

        Args:
            direction: Where to go.
        """
        return await self.played(self._step, direction)

    async def _step(self, direction: Direction) -> str:
        after = self._room.moved(self._position, direction)
        if after is None:
            return f"The way is blocked.\n{self._room.shown(self._position, self.signs)}"
        self._position = after
        self.won = self.over = self._room.solved(after)
        self.score = float(self.won)
        ending = "\nEvery box is on a goal." if self.won else ""
        return self._room.shown(after, self.signs) + ending

    def expert(self) -> ToolCall | str:
        """The next move of a shortest solution; or, where there is none any more, that it is lost."""
        if self.over:
            return "Done."
        if self._position not in self._way:
            try:
                self._way = solution(self._room, self._position) or {}
            except TooLarge:
                raise ConfigError("this level of Sokoban is too large for the expert") from None
        if self._position not in self._way:
            return "There is no way left."
        return ToolCall("move", {"direction": self._way[self._position]})
