"""Comparing what two queries gave.

Rows are compared as a multiset, or in their order where the right query orders them. Numbers may differ by rounding.
"""

from __future__ import annotations

import math
import re
from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any

from agentfly.environments.sql.database import Row

_DIGITS = 6
"""Significant digits that numbers have to share."""
_QUIET = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_INNER = re.compile(r"\([^()]*\)")
_ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)


def orders(query: str) -> bool:
    """Whether a query says in which order its rows come; an order within brackets is not its own."""
    bare = _QUIET.sub(" ", query)
    while (shorter := _INNER.sub(" ", bare)) != bare:
        bare = shorter
    return bool(_ORDERED.search(bare))


def same(ours: Sequence[Row], theirs: Sequence[Row], *, ordered: bool) -> bool:
    """Whether the rows are the same."""
    if len(ours) != len(theirs):
        return False
    if not ordered:
        ours, theirs = sorted(ours, key=_row_key), sorted(theirs, key=_row_key)
    return all(map(_same_row, ours, theirs))


def overlap(ours: Sequence[Row], theirs: Sequence[Row], *, ordered: bool) -> float:
    """Rows that both have over rows that either has, times how far the common ones are in the same order.

    That order counts as Kendall's tau, from 1 down to 0 (where it is below), and only where `ordered`.
    """
    mine, right = [_row_key(row) for row in ours], [_row_key(row) for row in theirs]
    common, either = Counter(mine) & Counter(right), Counter(mine) | Counter(right)
    if not either:
        return 1.0
    part = common.total() / either.total()
    return part * max(0.0, _tau(mine, right)) if ordered else part


def _tau(mine: Sequence[Row], right: Sequence[Row]) -> float:
    """Kendall's tau of the rows that both have, the first against the first of those that are equal."""
    places: dict[Row, deque[int]] = defaultdict(deque)
    for place, row in enumerate(right):
        places[row].append(place)
    found = [places[row].popleft() for row in mine if places.get(row)]
    pairs = len(found) * (len(found) - 1) // 2
    return 1.0 - 2.0 * _inversions(found) / pairs if pairs else 1.0


def _inversions(places: Sequence[int]) -> int:
    """Pairs that stand the wrong way round."""
    seen, wrong = list[int](), 0
    for place in places:
        at = bisect(seen, place)
        wrong += len(seen) - at
        seen.insert(at, place)
    return wrong


def _same_row(ours: Row, theirs: Row) -> bool:
    return len(ours) == len(theirs) and all(map(_same_value, ours, theirs))


def _same_value(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, int | float) and isinstance(theirs, int | float):
        return ours == theirs or math.isclose(ours, theirs, rel_tol=10.0**-_DIGITS, abs_tol=1e-9)
    return type(ours) is type(theirs) and bool(ours == theirs)


def _row_key(row: Row) -> Row:
    return tuple(map(_key, row))


def _key(value: Any) -> tuple[str, Any]:
    """Something that sorts among values of all kinds, the same for numbers that differ by rounding."""
    if value is None:
        return "", 0
    if isinstance(value, int | float):
        return "number", float(f"{value:.{_DIGITS - 1}e}") + 0.0
    return type(value).__name__, value
