"""Images of the database that a task's column `database` names, and of its twins.

    {"drawn": KEY, "level": 1}      generated; SQL.draw_tasks makes such rows
    {"spider": NAME}                of the Spider data set; spider_tasks makes such rows
    {"file": PATH}                  any SQLite file
    {"script": SQL}                 result of these statements

A twin has the same tables and other rows. A correct query is correct on the twins, too. Images are cached, because the
chains of a group use the same ones.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from agentfly.environments.sql.database import (
    QueryFailed,
    build_image,
    equal_rows,
    has_order_by,
    quote_name,
    read_file,
    run_query,
)
from agentfly.environments.sql.generator import LEVELS, TWINS, build_database
from agentfly.environments.sql.tasks import spider_file
from agentfly.errors import DataError

GOLD_SECONDS = 30.0
"""Time limit of the gold query."""
_CACHE_SIZE = 256
"""Databases."""
_ATTEMPTS = 6
"""Twins that are tried until the gold query gives another result than on the database."""
_MAX_COMPARED_ROWS = 10_000
_ADDED_ROWS = 24
"""Rows added to each table that the query names."""
_MAX_TEMPLATE_ROWS = 2000
"""Rows of a table that new ones are modeled on."""
_TEXT = re.compile(r"'((?:[^']|'')*)'|\"([^\"]*)\"")
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,15}(?:\.\d{1,15})?(?![\w.])")
_NUMERIC_TYPE = re.compile(r"int|real|num|dec|floa|doub", re.IGNORECASE)


def load_image(column: Any) -> bytes:
    """Return the database of a column. Raises DataError."""
    return _build_image(*_parse_column(column))


def load_twins(column: Any, gold: str) -> tuple[bytes, ...]:
    """Return the twins of a database.

    Twins of a generated database are generated. Of any other, one has rows removed. The rest have rows removed and
    added, so that the query `gold` gives another result if possible.
    """
    kind, name, version = _parse_column(column)
    queries = [""] * TWINS if kind == "drawn" else ["", *[gold] * (TWINS - 1)]
    return tuple(_build_twin(kind, name, version, gold=query, twin=twin) for twin, query in enumerate(queries, 1))


def _parse_column(column: Any) -> tuple[str, str, int]:
    """Return kind (drawn, file or script), name, and the level of a generated database or the mtime of a file."""
    if isinstance(column, dict):
        kind = next(
            (source for source in ("drawn", "spider", "file", "script") if isinstance(column.get(source), str)), ""
        )
        if kind == "drawn" and column.get("level") in LEVELS:
            return kind, column[kind], column["level"]
        if kind in ("spider", "file"):
            path = column[kind] if kind == "file" else str(spider_file(column[kind]))
            try:
                return "file", path, os.stat(path).st_mtime_ns
            except (OSError, ValueError) as error:
                raise DataError(f"the database {path!r} cannot be read: {error}") from error
        if kind == "script":
            return kind, column[kind], 0
    raise DataError(
        f"the column 'database' is {json.dumps(column, default=str)[:80]}; it may have drawn (with a level), spider, "
        "file or script"
    )


@lru_cache(_CACHE_SIZE)
def _build_image(kind: str, name: str, version: int) -> bytes:
    if kind == "drawn":
        return build_database(name, version)
    if kind == "file":
        return read_file(name)
    try:
        return build_image(lambda connection: connection.executescript(name))
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        raise DataError(f"the script of a database fails: {error}") from error


@lru_cache(TWINS * _CACHE_SIZE)
def _build_twin(kind: str, name: str, version: int, *, gold: str, twin: int) -> bytes:
    """Build one twin; with rows added if `gold` is not empty."""
    if kind == "drawn":
        return build_database(name, version, twin)
    real = _build_image(kind, name, version)
    if not gold:
        return _change_rows(real, Random(twin))

    def run_gold(image: bytes) -> list[tuple[Any, ...]]:
        try:
            return run_query(image, gold, seconds=GOLD_SECONDS, max_rows=_MAX_COMPARED_ROWS).rows
        except QueryFailed as error:
            raise DataError(f"the query of the column 'gold' fails: {error}: {gold:.200}") from error

    result, image = run_gold(real), real
    for attempt in range(_ATTEMPTS):
        random = Random(f"{twin}/{attempt}")
        image = _change_rows(real, random, gold)
        if not equal_rows(result, run_gold(image), ordered=has_order_by(gold)):
            break
    return image


def _drop_orphans(connection: sqlite3.Connection) -> None:
    """Delete rows whose foreign keys refer to no row."""
    with suppress(sqlite3.Error):  # not every schema declares its foreign keys correctly
        changes_before = -1
        while connection.total_changes > changes_before:
            changes_before = connection.total_changes
            for table, row, *_ in connection.execute("PRAGMA foreign_key_check").fetchall():
                connection.execute(f"DELETE FROM {quote_name(table)} WHERE rowid = ?", (row,))


def _change_rows(image: bytes, random: Random, query: str = "") -> bytes:
    """Add rows to the tables that `query` names, then remove about half of all rows and the rows that refer to them.

    The added rows change the result of the query, even if it is empty or a count of 0. A new row is a copy of an
    existing one. Columns that the query names get other values, among them the constants of the query and their
    neighbors. Properties of the data are preserved, so that equivalent queries stay equivalent: unique values stay
    unique, references lead to existing rows, and no column gets its first NULL.
    """

    def change(connection: sqlite3.Connection) -> None:
        connection.deserialize(image)
        names: dict[str, list[str]] = {"table": [], "trigger": []}
        for kind, name in connection.execute("SELECT type, name FROM sqlite_schema ORDER BY name").fetchall():
            if kind in names and not name.startswith("sqlite_"):
                names[kind].append(name)
        for name in names["trigger"]:  # so that changes of a twin cause no others
            connection.execute(f"DROP TRIGGER {quote_name(name)}")
        tables = names["table"]
        if query:
            words = set(re.findall(r"\w+", query.lower()))
            named = [table for table in tables if table.lower() in words]
            # Referenced tables first: new rows may then refer to new rows.
            for table in sorted(named, key=lambda name: len(_list_references(connection, name))):
                with suppress(sqlite3.Error):  # a virtual table, or one whose constraints reject every new row
                    _add_rows(connection, table, query, words=words, random=random)
            _drop_orphans(connection)
        for table in map(quote_name, tables):
            with suppress(sqlite3.Error):  # a table without rowid, or a virtual one
                rows = connection.execute(f"SELECT rowid FROM {table}").fetchall()
                removed = [row for row in rows if random.random() < 0.5]
                connection.executemany(f"DELETE FROM {table} WHERE rowid = ?", removed)
        _drop_orphans(connection)

    return build_image(change)


def _list_references(connection: sqlite3.Connection, table: str) -> dict[str, list[Any]]:
    """Map each column with a foreign key to the keys of the table that it refers to."""
    references = dict[str, list[Any]]()
    for _, _, other, column, target, *_ in connection.execute(
        f"PRAGMA foreign_key_list({quote_name(table)})"
    ).fetchall():
        with suppress(sqlite3.Error):  # the referenced table does not exist
            columns = connection.execute(f"PRAGMA table_info({quote_name(other)})").fetchall()
            key = target or next((name for _, name, *_, is_key in columns if is_key), "rowid")
            statement = f"SELECT {quote_name(key)} FROM {quote_name(other)} LIMIT {_MAX_TEMPLATE_ROWS}"
            rows = connection.execute(statement).fetchall()
            references[column.lower()] = [value for (value,) in rows if value is not None]
    return references


@dataclass
class _Column:
    name: str
    is_numeric: bool
    is_unique: bool
    required: bool
    values: list[Any]
    """Those that occur, without NULL."""
    constants: list[Any]
    """Values that the query may look for. Empty if it does not name the column."""
    targets: list[Any] | None
    """Keys of the referenced table. None if the column has no foreign key."""

    def draw(self, template: Any, random: Random) -> Any:
        """Draw the value of a new row that is modeled on a row with the value `template`."""
        used = set(self.values) if self.is_unique else set()
        if self.targets is not None:
            free = [target for target in self.targets if target not in used]
            return random.choice(free) if free and (self.required or template is not None) else None
        constants = [constant for constant in self.constants if constant not in used]
        if constants and random.random() < 0.6:
            return random.choice(constants)
        if self.is_unique or (template is None and self.required):
            return self.make_new(template)
        if self.constants and self.values and random.random() < 0.3:
            return random.choice(self.values)
        return template

    def make_new(self, template: Any) -> Any:
        """Make a value that does not occur yet."""
        if self.is_numeric:
            return max((value for value in self.values if isinstance(value, int | float)), default=0) + 1
        return f"{self.name if template is None else template} {len(self.values) + 1}"


def _add_rows(connection: sqlite3.Connection, table: str, query: str, *, words: set[str], random: Random) -> None:
    """Add rows to one table."""
    described = connection.execute(f"PRAGMA table_info({quote_name(table)})").fetchall()
    names = ", ".join(quote_name(name) for _, name, *_ in described)
    rows = connection.execute(f"SELECT {names} FROM {quote_name(table)} LIMIT {_MAX_TEMPLATE_ROWS}").fetchall()
    references = _list_references(connection, table)
    keys = [name for _, name, *_, key in described if key]
    columns = []
    for index, (_, name, kind, required, *_) in enumerate(described):
        values = [row[index] for row in rows if row[index] is not None]
        is_numeric = bool(_NUMERIC_TYPE.search(kind or "")) or (
            bool(values) and not any(isinstance(value, str) for value in values)
        )
        column = _Column(
            name=name,
            is_numeric=is_numeric,
            is_unique=keys == [name] or len(set(values)) == len(values) == len(rows),
            required=bool(required),
            values=values,
            constants=_list_constants(query, is_numeric) if name.lower() in words else [],
            targets=references.get(name.lower()),
        )
        columns.append(column)
    insert = f"INSERT OR IGNORE INTO {quote_name(table)} ({names}) VALUES ({', '.join('?' * len(columns))})"
    for _ in range(_ADDED_ROWS):
        template = random.choice(rows) if rows else (None,) * len(columns)
        row = [column.draw(value, random) for column, value in zip(columns, template, strict=True)]
        if not rows:  # no template: every column gets a value
            row = [
                column.make_new(None) if value is None else value for column, value in zip(columns, row, strict=True)
            ]
        if connection.execute(insert, row).rowcount > 0:
            for column, value in zip(columns, row, strict=True):
                column.values += [] if value is None else [value]


def _list_constants(query: str, is_numeric: bool) -> list[Any]:
    """List the constants of a query that suit a column, and their neighbors in order."""
    texts = [(single or double).replace("''", "'") for single, double in _TEXT.findall(query)]
    if is_numeric:
        numbers = [*_NUMBER.findall(_TEXT.sub(" ", query)), *filter(_NUMBER.fullmatch, texts)]
        parsed = [float(number) if "." in number else int(number) for number in numbers]
        return [value for number in parsed for value in (number - 1, number, number + 1)]
    plain = [text.replace("%", "").replace("_", "a") for text in texts]
    return [value for text in plain for value in ((text, f"{text}1", text[:-1]) if text[:1].isdigit() else (text,))]
