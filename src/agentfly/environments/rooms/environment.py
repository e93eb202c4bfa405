"""Two tasks that need images and tool calls: no text of a chain contains what the images show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from agentfly.environment import Environment
from agentfly.environments.data import sample_tasks
from agentfly.errors import DataError
from agentfly.models import find_digit, rooms
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Image, Task, ToolCall


class Rooms(Environment):
    """An image shows the number of a room; the image of that room shows a digit.

    The columns `digits`, `colors` and `seed` describe the rooms. `target` is one of them.
    """

    scored_by = "digit_match"

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Rooms with digits: which digit is in the room whose number the image shows?"""
        rows = _sample_rows("rooms", split, count, seed, rooms.sample_task)
        return [{**row, "question": rooms.QUESTION, "image": Image.of(rooms.draw_first_image(row)).url} for row in rows]

    async def reset(self, task: Task) -> None:
        names = ("digits", "colors", "target", "seed")
        digits, colors, target, seed = (task.columns.get(name) for name in names)
        if not (
            isinstance(digits, list | tuple)
            and isinstance(colors, list | tuple)
            and len(digits) == rooms.ROOMS
            and len(colors) == rooms.ROOMS + 1
            and all(digit in range(10) for digit in digits)
            and all(color in rooms.COLORS for color in colors)
            and target in range(rooms.ROOMS)
            and _is_non_negative(seed)
        ):
            raise DataError(
                f"task {task.id!r} needs the columns digits ({rooms.ROOMS} of 0 to 9), colors (one more), target and "
                "seed, as draw_tasks makes them"
            )
        self._task: Mapping[str, Any] = {name: task.columns[name] for name in names}
        self._target_seen = False

    @tool
    async def open_room(self, room: int) -> dict[str, Any]:
        """Look into a room.

        Args:
            room: Its number, from 0 to 9.
        """
        if not 0 <= room < rooms.ROOMS:
            return {"observation": "There is no such room."}
        self._target_seen = self._target_seen or room == self._task["target"]
        return {"observation": "", "image": Image.of(rooms.draw_room(self._task, room))}

    def expert(self) -> ToolCall | str:
        """Open the room that the image shows, then say the digit there."""
        target = self._task["target"]
        return str(self._task["digits"][target]) if self._target_seen else ToolCall("open_room", {"room": target})


class FindDigit(Environment):
    """A small digit somewhere in an image, of which quarters can be enlarged.

    The columns are `digit`, `cell` (its place among 4 × 4, row by row), `color` and `seed`.
    """

    scored_by = "digit_match"

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Walls with a digit: which one is it?"""
        rows = _sample_rows("find_digit", split, count, seed, find_digit.sample_task)
        return [
            {**row, "question": find_digit.QUESTION, "image": Image.of(find_digit.draw_view(row)).url} for row in rows
        ]

    async def reset(self, task: Task) -> None:
        names = ("digit", "cell", "color", "seed")
        digit, cell, color, seed = (task.columns.get(name) for name in names)
        if not (
            digit in range(10)
            and cell in range(find_digit.CELLS**2)
            and color in rooms.COLORS
            and _is_non_negative(seed)
        ):
            raise DataError(
                f"task {task.id!r} needs the columns digit (0 to 9), cell (0 to {find_digit.CELLS**2 - 1}), color and "
                "seed, as draw_tasks makes them"
            )
        self._task: Mapping[str, Any] = {name: task.columns[name] for name in names}
        self._path: list[int] = []

    @tool
    async def enlarge(self, quarter: int) -> dict[str, Any]:
        """Enlarge a quarter of the image.

        Args:
            quarter: 1 is the upper left, 2 the upper right, 3 the lower left, 4 the lower right one.
        """
        if not 1 <= quarter <= 4:
            return {"observation": "There is no such quarter."}
        if len(self._path) == find_digit.DEPTH:
            return {"observation": "It cannot be enlarged further."}
        self._path.append(quarter)
        return {"observation": "", "image": Image.of(find_digit.draw_view(self._task, self._path))}

    def expert(self) -> ToolCall | str:
        """Enlarge the quarter with the digit until the digit fills the image, then say it."""
        quarters = find_digit.quarters_of(self._task["cell"])
        if len(self._path) == len(quarters):
            return str(self._task["digit"])
        return ToolCall("enlarge", {"quarter": quarters[len(self._path)]})


def _sample_rows(
    name: str, split: str, count: int, seed: int, sample: Callable[[Random], dict[str, Any]]
) -> list[dict[str, Any]]:
    return sample_tasks(name, split, count, seed, lambda random, _: (str(row := sample(random)), row))


def _is_non_negative(value: object) -> bool:
    return isinstance(value, int) and value >= 0


@reward
def digit_match(prediction: str, answer: str) -> float:
    """1 if the reply is exactly the digit, else 0."""
    return float(prediction.strip() == answer)
