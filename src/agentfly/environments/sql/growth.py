"""Adds rows to a database so that the answer of a query changes, even if it counts to 0 or is empty.

A new row is a copy of an existing one. Columns that the query names take other values, among them the constants of the
query and their neighbors. What holds in the data stays true, so that queries that mean the same give the same: values
that are unique stay unique, references lead to rows that exist, and no column gets its first NULL.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.environments.sql.database import built, drop_orphans, drop_triggers, quoted, table_names

_ADDED = 24
"""Rows added to each table that the query names."""
_MOST_READ = 2000
"""Rows of a table that new ones are modeled on."""
_TEXT = re.compile(r"'((?:[^']|'')*)'|\"([^\"]*)\"")
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,15}(?:\.\d{1,15})?(?![\w.])")
_NUMERIC = re.compile(r"int|real|num|dec|floa|doub", re.IGNORECASE)


def add_rows(image: bytes, query: str, random: Random) -> bytes:
    """The database with further rows in the tables that a query names."""

    def grow(connection: sqlite3.Connection) -> None:
        connection.deserialize(image)
        drop_triggers(connection)
        words = set(re.findall(r"\w+", query.lower()))
        named = [table for table in table_names(connection) if table.lower() in words]
        # Referenced tables first: new rows may then refer to new rows.
        for table in sorted(named, key=lambda each: len(_references(connection, each))):
            with suppress(sqlite3.Error):  # a virtual table, or one whose constraints refuse every new row
                _add(connection, table, words, query, random)
        drop_orphans(connection)

    return built(grow)


@dataclass
class _Column:
    name: str
    is_numeric: bool
    is_key: bool
    """Whether no value occurs twice."""
    required: bool
    values: list[Any]
    """Those that occur, without NULL."""
    constants: list[Any]
    """Values that the query may ask for; empty if it does not name the column."""
    targets: list[Any] | None
    """The keys of the table it refers to; None if it refers to none."""

    def next_value(self, template: Any, random: Random) -> Any:
        used = set(self.values) if self.is_key else set()
        if self.targets is not None:
            free = [each for each in self.targets if each not in used]
            return random.choice(free) if free and (self.required or template is not None) else None
        constants = [each for each in self.constants if each not in used]
        if constants and random.random() < 0.6:
            return random.choice(constants)
        if self.is_key or (template is None and self.required):
            return self._fresh(template)
        if self.constants and self.values and random.random() < 0.3:
            return random.choice(self.values)
        return template

    def _fresh(self, template: Any) -> Any:
        if self.is_numeric:
            numbers = [each for each in self.values if isinstance(each, int | float)]
            return max(numbers, default=0) + 1
        return f"{self.name if template is None else template} {len(self.values) + 1}"


def _add(connection: sqlite3.Connection, table: str, words: set[str], query: str, random: Random) -> None:
    described = connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()
    names = ", ".join(quoted(name) for _, name, *_ in described)
    rows = connection.execute(f"SELECT {names} FROM {quoted(table)} LIMIT {_MOST_READ}").fetchall()
    references = _references(connection, table)
    keys = [name for _, name, *_, key in described if key]
    columns = []
    for place, (_, name, kind, required, *_) in enumerate(described):
        values = [row[place] for row in rows if row[place] is not None]
        is_numeric = bool(_NUMERIC.search(kind or "")) or bool(values and not any(isinstance(v, str) for v in values))
        is_unique = keys == [name] or len(set(values)) == len(values) == len(rows)
        constants = _constants(query, is_numeric) if name.lower() in words else []
        columns.append(
            _Column(name, is_numeric, is_unique, bool(required), values, constants, references.get(name.lower()))
        )
    insert = f"INSERT OR IGNORE INTO {quoted(table)} ({names}) VALUES ({', '.join('?' * len(columns))})"
    for _ in range(_ADDED):
        template = random.choice(rows) if rows else (None,) * len(columns)
        row = [column.next_value(value, random) for column, value in zip(columns, template, strict=True)]
        if not rows:  # nothing to model it on: every column gets a value
            row = [column._fresh(None) if value is None else value for column, value in zip(columns, row, strict=True)]
        if connection.execute(insert, row).rowcount > 0:
            for column, value in zip(columns, row, strict=True):
                column.values += [] if value is None else [value]


def _references(connection: sqlite3.Connection, table: str) -> dict[str, list[Any]]:
    """For each column that refers to another table, the keys there."""
    found = dict[str, list[Any]]()
    for _, _, other, own, theirs, *_ in connection.execute(f"PRAGMA foreign_key_list({quoted(table)})").fetchall():
        with suppress(sqlite3.Error):  # it refers to what is not there
            keys = connection.execute(f"PRAGMA table_info({quoted(other)})").fetchall()
            key = theirs or next((name for _, name, *_, is_key in keys if is_key), "rowid")
            rows = connection.execute(f"SELECT {quoted(key)} FROM {quoted(other)} LIMIT {_MOST_READ}").fetchall()
            found[own.lower()] = [value for (value,) in rows if value is not None]
    return found


def _constants(query: str, is_numeric: bool) -> list[Any]:
    """The constants of a query for a column: themselves, and what lies beside them in order."""
    texts = [(single or double).replace("''", "'") for single, double in _TEXT.findall(query)]
    if is_numeric:
        written = [*_NUMBER.findall(_TEXT.sub(" ", query)), *filter(_NUMBER.fullmatch, texts)]
        numbers = [float(each) if "." in each else int(each) for each in written]
        return [value for each in numbers for value in (each - 1, each, each + 1)]
    plain = [each.replace("%", "").replace("_", "a") for each in texts]
    return [value for each in plain for value in ((each, f"{each}1", each[:-1]) if each[:1].isdigit() else (each,))]
