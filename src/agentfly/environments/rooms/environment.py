"""Two tasks that take looking and acting: no text of a chain contains what the images show."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from agentfly.environment import Environment
from agentfly.environments.task_sampling import sample_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.models.rooms import (
    COLORS,
    MAX_SIZE,
    ROOMS,
    draw_first_image,
    draw_place_image,
    format_question,
    sample_places,
)
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Image, Task, ToolCall


class _DigitEnvironment(Environment):
    """Digits at several places. The columns `digits`, `colors` and `seed` describe them; `target` is one of them."""

    scored_by = "digit_match"

    async def reset(self, task: Task) -> None:
        self._places = read_places(task)
        self._digit_seen = ""
        """The digit at the target, once it was shown; until then empty."""

    def _look(self, place: int) -> dict[str, Any]:
        """Show the digit at a place."""
        places = self._places
        if place == places["target"]:
            self._digit_seen = str(places["digits"][place])
        return {"observation": "", "image": Image.of(draw_place_image(places, place))}


class Rooms(_DigitEnvironment):
    """An image shows the number of a room; in that room hangs a digit."""

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Rooms with digits: which digit is in the room whose number the image shows?"""
        return _sample_rows("rooms", split, count, seed, lambda random: sample_places(random, ROOMS))

    @tool
    async def open_room(self, room: int) -> dict[str, Any]:
        """Look into a room.

        Args:
            room: Its number, from 0 to 9.
        """
        if not 0 <= room < min(ROOMS, len(self._places["digits"])):
            return {"observation": "There is no such room."}
        return self._look(room)

    def expert(self) -> ToolCall | str:
        """Open the room that the image shows, then say the digit there."""
        return self._digit_seen or ToolCall("open_room", {"room": self._places["target"]})


class Tiles(_DigitEnvironment):
    """Tiles of different colors, each with a digit under it; clicking on a tile shows the digit."""

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, size: int = MAX_SIZE
    ) -> list[dict[str, Any]]:
        """`size` rows and columns of tiles: which digit is under the tile of a given color?"""
        if not 2 <= size <= MAX_SIZE:
            raise ConfigError(f"there are 2 to {MAX_SIZE} rows and columns of tiles, not {size!r:.40}")
        return _sample_rows("tiles", split, count, seed, lambda random: sample_places(random, size**2, distinct=True))

    @tool
    async def click_tile(self, row: int, column: int) -> dict[str, Any]:
        """Click on a tile to see what is under it.

        Args:
            row: Row of the tile; 1 is the top one.
            column: Column of the tile; 1 is the leftmost one.
        """
        size = round(len(self._places["digits"]) ** 0.5)
        if not (1 <= row <= size and 1 <= column <= size):
            return {"observation": "There is no such tile."}
        return self._look((row - 1) * size + column - 1)

    def expert(self) -> ToolCall | str:
        """Click on the tile of the color, then say the digit under it."""
        row, column = divmod(self._places["target"], round(len(self._places["digits"]) ** 0.5))
        return self._digit_seen or ToolCall("click_tile", {"row": row + 1, "column": column + 1})


def _sample_rows(
    name: str, split: str, count: int, seed: int, draw: Callable[[Random], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of a split with question and first image, which is drawn for the places that are in the split only."""

    def draw_content(random: Random, _: int) -> tuple[str, dict[str, Any]]:
        places = draw(random)
        return str(places), places

    rows = sample_tasks(name, split, count, seed, draw_content)
    return [{**row, "question": format_question(row), "image": Image.of(draw_first_image(row)).url} for row in rows]


def read_places(task: Task) -> dict[str, Any]:
    """Validate the columns of a task. Raises DataError."""
    columns = task.columns
    digits, colors, target, seed = (columns.get(name) for name in ("digits", "colors", "target", "seed"))
    if not (
        isinstance(digits, list | tuple)
        and isinstance(colors, list | tuple)
        and 0 < len(digits) < len(colors)
        and all(digit in range(10) for digit in digits)
        and all(color in COLORS for color in colors)
        and target in range(len(digits))
        and isinstance(seed, int)
        and seed >= 0
    ):
        raise DataError(
            f"task {task.id!r} needs the columns digits (0 to 9), colors (one more), target and seed, as draw_tasks "
            "makes them"
        )
    return {"digits": list(digits), "colors": list(colors), "target": target, "seed": seed}


@reward
def digit_match(prediction: str, answer: str) -> float:
    """1 if the reply is exactly the digit, else 0."""
    return float(prediction.strip() == answer)
