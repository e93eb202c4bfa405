"""Coordinates on a grid and the four directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from agentfly.errors import DataError

Direction = Literal["up", "down", "left", "right"]
Place = tuple[int, int]
"""Row and column, from the top left."""
OFFSETS: dict[Direction, Place] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MAX_SIZE = 64
"""Maximum number of rows and of columns in a task."""


def neighbor(place: Place, direction: Direction) -> Place:
    """The adjacent place in a direction."""
    row, column = OFFSETS[direction]
    return place[0] + row, place[1] + column


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
