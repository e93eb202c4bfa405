"""A SQLite database as bytes, and copies of it that live in memory and die with their chain.

A copy is all that a query can reach: an authorizer refuses every way out of it, a clock stops what runs too long, and
limits keep small what it may hold. What SQLite has to say about a query is told as it says it.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.errors import DataError

Row = tuple[Any, ...]

LONGEST_QUERY = 20_000
"""Characters."""
_LARGEST_VALUE = 30_000
"""Bytes of a text, a blob or a row; functions that compare two of them cannot be interrupted."""
_PAGES = 16_384
"""Of a copy: 64 MB of the usual 4 KB each."""
_BETWEEN_LOOKS = 1000
"""Instructions of SQLite's machine between two looks at the clock."""
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: _LARGEST_VALUE,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * LONGEST_QUERY,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# No views and triggers: a few that each use the one before twice are unfolded without a look at the clock.
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_WRITING = {
    *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_ALTER_TABLE),
    *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_REINDEX),
    *(sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_DROP_VIEW),
    *(sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT),
}
_PRAGMAS = {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info"}
"""They tell about the schema, and change nothing."""
_FORBIDDEN = {"load_extension", "fts3_tokenizer", "printf", "format"}
"""Functions: the first two lead out, and the others can be made to write for minutes without a look at the clock."""
_QUOTED = re.compile(
    r"((?:'(?:[^']|'')*+'?|\"(?:[^\"]|\"\")*+\"?|`[^`]*+`?|\[[^\]]*+\]?))|--[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL
)
"""Something in quotes, or a comment. One that is not closed runs to the end, where SQLite refuses the query."""
_WORD = r"(?<![\w$\x80-\U0010ffff])[\w$\x80-\U0010ffff]++"
_NAMED = re.compile(rf"({_WORD})\s*+(?:\([^()]*+\)\s*+)?as\s*+(?:not\s++)?(?:materialized\s*+)?\(")
"""The name of a common table expression."""
_MOST_UNFOLDED = 1000


class QueryFailed(Exception):
    """A query could not be carried out; the message is for whoever wrote it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a statement gave."""

    columns: tuple[str, ...]
    """Empty where it was no query."""
    rows: list[Row]
    more: bool = False
    """Whether there are further rows, which were not asked for."""
    changed: int = 0
    """Rows that were written."""
    read: frozenset[str] = frozenset()
    """The tables that it looks at."""


class Database:
    """A copy of a database, in memory."""

    def __init__(self, image: bytes, *, seconds: float, read_only: bool = False) -> None:
        """`seconds` is how long a statement may run."""
        self._seconds, self._until = seconds, 0.0
        self._allowed = _READING if read_only else _READING | _WRITING
        self._lock, self._read = threading.Lock(), set[str]()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            self._connection.deserialize(image)
            self._connection.execute(f"PRAGMA max_page_count = {_PAGES}")
            self._connection.text_factory = lambda data: data.decode(errors="replace")
        except sqlite3.Error as error:
            self._connection.close()
            raise DataError(f"this is no SQLite database: {error}") from error
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_progress_handler(self._late, _BETWEEN_LOOKS)
        self._connection.set_authorizer(self._authorized)

    def _late(self) -> bool:
        return time.monotonic() > self._until

    def _authorized(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and first:
            self._read.add(first.lower())
        if action == sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_DENY if (second or "").lower() in _FORBIDDEN else sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if (first or "").lower() in _PRAGMAS else sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in self._allowed else sqlite3.SQLITE_DENY

    def run(self, query: str, most: int) -> Answer:
        """Carry out one statement; of its rows, the first so many."""
        if len(query) > LONGEST_QUERY:
            raise QueryFailed(f"the query has {len(query)} characters; {LONGEST_QUERY} are allowed")
        if _unfolded(query) > _MOST_UNFOLDED:
            raise QueryFailed("its common table expressions refer to one another too often")
        with self._lock:
            self._read.clear()
            self._until = time.monotonic() + self._seconds
            try:
                cursor = self._connection.execute(query)
                rows = cursor.fetchmany(most + 1)
                columns = tuple(each[0] for each in cursor.description or ())
                answer = Answer(columns, rows[:most], len(rows) > most, max(cursor.rowcount, 0), frozenset(self._read))
                cursor.close()
                return answer
            except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
                raise QueryFailed(self._reason(error)) from error

    def _reason(self, error: Exception) -> str:
        if self._late():
            return f"it took longer than {self._seconds:g} s and was stopped"
        told = str(error).strip() or type(error).__name__
        if told == "not authorized":
            return "not authorized: only this database can be used, and statements that leave it are refused"
        return "one statement at a time, please" if "one statement" in told else told

    def close(self) -> None:
        """Forget it all. A statement that is still running is stopped first."""
        with suppress(sqlite3.ProgrammingError):  # it is closed already
            self._connection.interrupt()
        with self._lock:
            self._connection.close()


def _unfolded(query: str) -> int:
    """How often, at most, a part of a query is copied before SQLite looks at the clock again.

    Every use of a common table expression is a copy of it. A few that each use the one before several times are enough
    to fill the memory.
    """
    bare = _QUOTED.sub(_as_word, query).lower()
    uses = Counter(re.findall(_WORD, bare))
    return math.prod(max(1, uses[name] - 1) for name in _NAMED.findall(bare))


def _as_word(found: re.Match[str]) -> str:
    """A name in quotes as a word of its own, the same as without them where it needs none; a comment as a space."""
    name = (found[1] or "  ")[1:-1]
    return f" {name if name.isidentifier() else 'q' + name.encode(errors='replace').hex()} " if found[1] else " "


def built(fill: Callable[[sqlite3.Connection], object]) -> bytes:
    """The image of a database that a function fills."""
    connection = sqlite3.connect(":memory:")
    try:
        fill(connection)
        connection.commit()
        return connection.serialize()
    finally:
        connection.close()


def read_file(path: str) -> bytes:
    """The image of a database file; nothing is written beside it."""
    try:
        source = sqlite3.connect(f"file:{path.replace('?', '%3f').replace('#', '%23')}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise DataError(f"{path} cannot be opened: {error}") from error
    try:
        image = built(source.backup)
    except sqlite3.Error as error:
        raise DataError(f"{path} is no SQLite database that can be read: {error}") from error
    finally:
        source.close()
    return image[:18] + b"\1\1" + image[20:]  # a copy in memory has no write-ahead log, whatever its file had


def thinned(image: bytes, random: Random) -> bytes:
    """The database with about half of its rows; what referred to a row that is gone is gone as well."""

    def thin(connection: sqlite3.Connection) -> None:
        connection.deserialize(image)
        drop_triggers(connection)
        for table in map(quoted, table_names(connection)):
            with suppress(sqlite3.Error):  # it has no rowid, or is no table of this database
                rows = connection.execute(f"SELECT rowid FROM {table}").fetchall()
                gone = [row for row in rows if random.random() < 0.5]
                connection.executemany(f"DELETE FROM {table} WHERE rowid = ?", gone)
        drop_orphans(connection)

    return built(thin)


def drop_triggers(connection: sqlite3.Connection) -> None:
    """Delete all triggers, so that changes of a twin cause no others."""
    for name in table_names(connection, "trigger"):
        connection.execute(f"DROP TRIGGER {quoted(name)}")


def drop_orphans(connection: sqlite3.Connection) -> None:
    """Delete the rows that refer to rows that do not exist."""
    with suppress(sqlite3.Error):  # what refers to what is not well said in every schema
        before = -1
        while connection.total_changes > before:
            before = connection.total_changes
            for table, row, *_ in connection.execute("PRAGMA foreign_key_check").fetchall():
                connection.execute(f"DELETE FROM {quoted(table)} WHERE rowid = ?", (row,))


def table_names(connection: sqlite3.Connection, kind: str = "table") -> list[str]:
    """The names of all tables, or triggers, except SQLite's own."""
    found = connection.execute("SELECT name FROM sqlite_schema WHERE type = ? ORDER BY name", (kind,)).fetchall()
    return [name for (name,) in found if not name.startswith("sqlite_")]


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'
