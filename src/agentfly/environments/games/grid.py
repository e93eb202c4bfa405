"""Places on a grid, and the four ways from each to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from agentfly.errors import DataError

Direction = Literal["up", "down", "left", "right"]
Place = tuple[int, int]
"""A row and a column, from the top left."""
WAYS: dict[Direction, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LARGEST = 64
"""Most rows, and most columns, of a grid that a task may bring."""


def beside(place: Place, direction: Direction) -> Place:
    """The place next to this one."""
    row, column = WAYS[direction]
    return place[0] + row, place[1] + column


def places_of(symbols: str, rows: Sequence[str]) -> list[Place]:
    """Where one of the symbols stands."""
    return [(y, x) for y, row in enumerate(rows) for x, symbol in enumerate(row) if symbol in symbols]


def checked_rows(rows: Any, symbols: str, column: str) -> list[str]:
    """The rows of a grid, as a task's column has them, if they are rows of these symbols."""
    if not isinstance(rows, list | tuple) or not all(isinstance(row, str) for row in rows):
        raise DataError(f"the column {column!r} must be a list of rows of text, not {rows!r:.80}")
    if not 0 < len(rows) <= LARGEST or not all(len(row) <= LARGEST for row in rows):
        raise DataError(f"the column {column!r} must have 1 to {LARGEST} rows, none longer than {LARGEST}")
    if strange := sorted({symbol for row in rows for symbol in row} - set(symbols)):
        raise DataError(f"the column {column!r} is written in {symbols!r}; it has {''.join(strange)!r:.80} too")
    return list(rows)
