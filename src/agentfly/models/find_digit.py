"""Images, tasks and demonstrations of a digit to be found, on which the model `tiny-vision-find` is trained.

A sign with a digit is somewhere on a wall of 4 × 4 cells, and small in the image of the whole wall. The tool enlarges a
quarter of what is shown; after two calls a cell fills the image. Demonstrations teach reading and locating, and use the
tool in every way, most of them wrong. The environment is `agentfly.environments.rooms.FindDigit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from agentfly.models.rooms import (
    COLORS,
    READING_QUESTION,
    SIDE,
    Demonstration,
    add_noise,
    draw_wall,
    write_digit,
)

if TYPE_CHECKING:
    import PIL.Image

CELLS = 4
"""Rows and columns of cells."""
DEPTH = 2
"""Calls after which a cell fills the image."""
SIGN = 41
"""Side of the dark square behind the digit, in pixels of the image that a cell fills. Without it, a small model learns
to read long before it learns where in the first image a digit is."""
QUESTION = "What digit is on this wall?"
LOCATING_QUESTION = "Where is the digit?"
READING_SHARE = 0.25
"""Share of conversations that teach reading."""
LOCATING_SHARE = 0.4
"""Share of conversations that teach in which quarter the digit is."""
STRATEGIES = {"right": 35, "next": 50, "any": 15}
"""Which quarter a demonstration enlarges, with its share in percent: the right one, the next one, or any."""
GUESS_SHARE = 0.1
"""Share of the other conversations that guess the digit early."""

TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "enlarge",
        "description": "Enlarge a quarter of the image.",
        "parameters": {
            "type": "object",
            "properties": {
                "quarter": {
                    "type": "integer",
                    "description": "1 is the upper left, 2 the upper right, 3 the lower left, 4 the lower right one.",
                }
            },
            "required": ["quarter"],
            "additionalProperties": False,
        },
    },
}
"""Schema of the tool `FindDigit.enlarge`."""
TEXTS = (
    QUESTION,
    READING_QUESTION,
    LOCATING_QUESTION,
    "There is no such quarter.",
    "It cannot be enlarged further.",
    *(f'{{"name": "enlarge", "arguments": {{"quarter": {quarter}}}}}' for quarter in range(1, 5)),
)
"""What the tokenizer of a model is trained on."""


def sample_task(random: Random) -> dict[str, Any]:
    """Columns of a task: the digit, the cell that it is in, counted row by row, the color of the wall, and a seed."""
    digit = random.randrange(10)
    return {
        "digit": digit,
        "cell": random.randrange(CELLS**2),
        "color": random.choice(list(COLORS)),
        "seed": random.randrange(2**31),
        "answer": str(digit),
    }


def quarters_of(cell: int) -> tuple[int, ...]:
    """The quarters, from 1 to 4, that lead to a cell."""
    row, column = divmod(cell, CELLS)
    return tuple(1 + 2 * (row >> level & 1) + (column >> level & 1) for level in reversed(range(DEPTH)))


def draw_view(task: Mapping[str, Any], path: Sequence[int] = ()) -> PIL.Image.Image:
    """The part of the wall that is shown after these quarters were enlarged."""
    from PIL import Image as Pillow
    from PIL import ImageDraw

    rng = np.random.default_rng(task["seed"])
    wall = draw_wall(CELLS * SIDE, task["color"], rng)
    row, column = divmod(task["cell"], CELLS)
    dx, dy = rng.integers(-2, 3, 2)
    x, y = int(column * SIDE + SIDE // 2 + dx), int(row * SIDE + SIDE // 2 + dy)
    half = SIGN // 2
    ImageDraw.Draw(wall).rectangle((x - half, y - half, x + half, y + half), COLORS["black"])
    write_digit(wall, task["digit"], (x, y))
    left = top = 0
    width = CELLS * SIDE
    for quarter in path:
        width //= 2
        left += width * ((quarter - 1) % 2)
        top += width * ((quarter - 1) // 2)
    view = wall.crop((left, top, left + width, top + width)).resize((SIDE, SIDE), Pillow.Resampling.BOX)
    return add_noise(view, np.random.default_rng([task["seed"], *path]))


def demonstrations(count: int, seed: int = 0) -> Iterator[Demonstration]:
    """Yield scripted conversations; the same seed yields the same ones.

    There are 10^12 tasks, so that held-out tasks are not among those of the conversations.
    """
    random = Random(f"find_digit {seed}")
    for _ in range(count):
        task = sample_task(random)
        right = quarters_of(task["cell"])
        kind = random.random()
        if kind < READING_SHARE:
            yield Demonstration(draw_view(task, right), READING_QUESTION, str(task["digit"]))
            continue
        if kind < READING_SHARE + LOCATING_SHARE:
            level = random.randrange(DEPTH)
            yield Demonstration(draw_view(task, right[:level]), LOCATING_QUESTION, str(right[level]))
            continue
        path: list[int] = []
        for level in range(random.randrange(DEPTH) if random.random() < GUESS_SHARE else DEPTH):
            strategy = random.choices(list(STRATEGIES), list(STRATEGIES.values()))[0]
            anywhere = random.randint(1, 4)
            if path != list(right[:level]):  # the digit is not in the image
                strategy = "any"
            path.append({"right": right[level], "next": right[level] % 4 + 1, "any": anywhere}[strategy])
        reached = tuple(path) == right
        yield Demonstration(
            draw_view(task),
            QUESTION,
            reply=str(task["digit"] if reached else random.randrange(10)),
            tool="enlarge",
            calls=tuple({"quarter": quarter} for quarter in path),
            observations=tuple(draw_view(task, path[: level + 1]) for level in range(len(path))),
        )
