"""Where the database of a task comes from, as its column `database` says.

    {"drawn": KEY, "level": 1}      drawn by a seed; SQL.draw_tasks makes such rows
    {"spider": NAME}                of the Spider data set; spider_tasks makes such rows
    {"file": PATH}                  any SQLite file
    {"script": SQL}                 what these statements make

Images are kept, so that the chains of a group do not make the same one again and again.
"""

from __future__ import annotations

import json
import os
import sqlite3
from functools import lru_cache
from random import Random
from typing import Any

from agentfly.environments.sql.database import Database, QueryFailed, Row, built, read_file, thinned
from agentfly.environments.sql.drawn import LEVELS, TWINS, image_of
from agentfly.environments.sql.growth import add_rows
from agentfly.environments.sql.official import spider_file
from agentfly.environments.sql.results import orders, same
from agentfly.errors import DataError

_KEPT = 256
"""Images of each kind, those used last."""
_ATTEMPTS = 6
"""Twins that are tried until the right query gives something else than on the database."""
_MOST_COMPARED = 10_000
_GOLD_SECONDS = 30.0


def image(column: Any) -> bytes:
    """The database."""
    return _image(*_told(column))


def twins(column: Any, gold: str) -> tuple[bytes, ...]:
    """Databases with the same tables and other rows. Of a drawn one: drawn ones. Of others: one with rows left out, the
    rest with rows left out and rows added, on which the query `gold` gives something else where that can be had."""
    kind, what, level = _told(column)
    if kind == "drawn":
        return tuple(_drawn(what, level, twin) for twin in range(1, TWINS + 1))
    grown = (_grown(kind, what, level, gold, twin) for twin in range(2, TWINS + 1))
    return (_thinned(kind, what, level, 1), *grown)


def _told(column: Any) -> tuple[str, str, int]:
    """Its kind, what it is called, and its level, which is 0 but for a drawn one; for a file, when it was changed."""
    if isinstance(column, dict):
        kind = next((each for each in ("drawn", "spider", "file", "script") if isinstance(column.get(each), str)), "")
        if kind == "drawn" and column.get("level") in LEVELS:
            return kind, column[kind], column["level"]
        if kind == "spider" or kind == "file":
            path = column[kind] if kind == "file" else spider_file(column[kind])
            return "file", str(path), _changed(str(path))
        if kind == "script":
            return kind, column[kind], 0
    raise DataError(
        f"the column 'database' is {json.dumps(column, default=str)[:80]}; it may have drawn (with a level), spider, "
        "file or script"
    )


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except (OSError, ValueError) as error:
        raise DataError(f"the database {path!r} cannot be read: {error}") from error


@lru_cache(_KEPT)
def _image(kind: str, what: str, level: int) -> bytes:
    if kind == "drawn":
        return _drawn(what, level, 0)
    if kind == "file":
        return read_file(what)
    try:
        return built(lambda connection: connection.executescript(what))
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise DataError(f"the script of a database fails: {error}") from error


@lru_cache(_KEPT)
def _thinned(kind: str, what: str, level: int, twin: int) -> bytes:
    return thinned(_image(kind, what, level), Random(twin))


@lru_cache(_KEPT)
def _grown(kind: str, what: str, level: int, gold: str, twin: int) -> bytes:
    real = _image(kind, what, level)
    result = _rows(real, gold)
    image = real
    for attempt in range(_ATTEMPTS):
        random = Random(f"{twin}/{attempt}")
        image = thinned(add_rows(real, gold, random), random)
        if not same(result, _rows(image, gold), ordered=orders(gold)):
            break
    return image


def _rows(image: bytes, gold: str) -> list[Row]:
    copy = Database(image, seconds=_GOLD_SECONDS, read_only=True)
    try:
        return copy.run(gold, _MOST_COMPARED).rows
    except QueryFailed as error:
        raise DataError(f"the query of the column 'gold' fails: {error}: {gold:.200}") from error
    finally:
        copy.close()


_drawn = lru_cache(_KEPT)(image_of)
