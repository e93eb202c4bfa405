"""SQLite databases as bytes (images), isolated in-memory copies of them, and the comparison of query results.

A query can reach nothing but its copy: an authorizer denies every statement that leaves it, a deadline interrupts long
queries, and limits bound what the copy may hold. SQLite's own error messages are passed on.
"""

from __future__ import annotations

import math
import re
import sqlite3
import threading
import time
from bisect import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agentfly.errors import DataError

Row = tuple[Any, ...]

MAX_QUERY_LENGTH = 20_000
"""Characters."""
_MAX_PAGES = 16_384
"""Size of a copy: 64 MB with the usual pages of 4 KB."""
_PROGRESS_INTERVAL = 1000
"""Instructions of SQLite's virtual machine between two checks of the deadline."""
_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 30_000,  # bytes. Functions that compare two values cannot be interrupted
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 4 * MAX_QUERY_LENGTH,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
# No views and triggers: a few that each use the previous one twice are expanded without a check of the deadline.
_READ_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE}
_WRITE_ACTIONS = {
    *(sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE, sqlite3.SQLITE_ALTER_TABLE),
    *(sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_CREATE_INDEX, sqlite3.SQLITE_REINDEX),
    *(sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_INDEX, sqlite3.SQLITE_DROP_VIEW),
    *(sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT),
}
_ALLOWED_PRAGMAS = {"table_info", "table_xinfo", "table_list", "foreign_key_list", "index_list", "index_info"}
_DENIED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "printf", "format"}
"""The first two leave the database. The others can run for minutes without a check of the deadline."""
_QUOTED_OR_COMMENT = re.compile(
    r"((?:'(?:[^']|'')*+'?|\"(?:[^\"]|\"\")*+\"?|`[^`]*+`?|\[[^\]]*+\]?))|--[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL
)
"""An unclosed one extends to the end, where SQLite rejects the query."""
_WORD = r"(?<![\w$\x80-\U0010ffff])[\w$\x80-\U0010ffff]++"
_CTE_NAME = re.compile(rf"({_WORD})\s*+(?:\([^()]*+\)\s*+)?as\s*+(?:not\s++)?(?:materialized\s*+)?\(")
_MAX_CTE_COPIES = 1000
_TABLES = "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
_MAX_SCHEMA_ROWS = 500
"""Tables, and columns of a table, that the schema shows."""


class QueryFailed(Exception):
    """A query failed; the message is for its author."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Result of a statement."""

    columns: tuple[str, ...]
    """Empty if the statement is not a query."""
    rows: list[Row]
    truncated: bool = False
    """Whether there are more rows than requested."""
    changed: int = 0
    """Number of rows written."""
    tables: frozenset[str] = frozenset()
    """Tables that it reads."""


class Database:
    """An in-memory copy of a database. Thread-safe."""

    def __init__(self, image: bytes, *, seconds: float, read_only: bool = False) -> None:
        """`seconds`: time limit of a statement."""
        self._seconds, self._deadline = seconds, 0.0
        self._allowed = _READ_ACTIONS if read_only else _READ_ACTIONS | _WRITE_ACTIONS
        self._lock, self._tables = threading.Lock(), set[str]()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            self._connection.deserialize(image)
            self._connection.execute(f"PRAGMA max_page_count = {_MAX_PAGES}")
            self._connection.text_factory = lambda data: data.decode(errors="replace")
        except sqlite3.Error as error:
            self._connection.close()
            raise DataError(f"this is no SQLite database: {error}") from error
        for limit, value in _LIMITS.items():
            self._connection.setlimit(limit, value)
        self._connection.set_progress_handler(self._is_late, _PROGRESS_INTERVAL)
        self._connection.set_authorizer(self._authorize)

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        if action == sqlite3.SQLITE_READ and first:
            self._tables.add(first.lower())
        if action == sqlite3.SQLITE_FUNCTION:
            return sqlite3.SQLITE_DENY if (second or "").lower() in _DENIED_FUNCTIONS else sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_PRAGMA:
            return sqlite3.SQLITE_OK if (first or "").lower() in _ALLOWED_PRAGMAS else sqlite3.SQLITE_DENY
        return sqlite3.SQLITE_OK if action in self._allowed else sqlite3.SQLITE_DENY

    def run(self, query: str, max_rows: int) -> QueryResult:
        """Run one statement and fetch at most `max_rows` rows. Raises QueryFailed."""
        if len(query) > MAX_QUERY_LENGTH:
            raise QueryFailed(f"the query has {len(query)} characters; {MAX_QUERY_LENGTH} are allowed")
        if _count_cte_copies(query) > _MAX_CTE_COPIES:
            raise QueryFailed("its common table expressions refer to one another too often")
        with self._lock:
            self._tables.clear()
            self._deadline = time.monotonic() + self._seconds
            try:
                cursor = self._connection.execute(query)
                rows = cursor.fetchmany(max_rows + 1)
                result = QueryResult(
                    columns=tuple(column[0] for column in cursor.description or ()),
                    rows=rows[:max_rows],
                    truncated=len(rows) > max_rows,
                    changed=max(cursor.rowcount, 0),
                    tables=frozenset(self._tables),
                )
                cursor.close()
                return result
            except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
                message = str(error).strip() or type(error).__name__
                if self._is_late():
                    message = f"it took longer than {self._seconds:g} s and was stopped"
                elif message == "not authorized":
                    message += ": only this database can be used, and statements that leave it are refused"
                elif "one statement" in message:
                    message = "one statement at a time, please"
                raise QueryFailed(message) from error

    def serialize(self) -> bytes:
        """The database as it is now, as an image."""
        with self._lock:
            self._deadline = float("inf")
            return self._connection.serialize()

    def describe_schema(self) -> str:
        """One line per table, `pilots(id integer, name text)`, then one per foreign key. Raises QueryFailed."""
        tables = [str(name) for (name,) in self.run(_TABLES, _MAX_SCHEMA_ROWS).rows]
        lines, references = [], []
        for table in tables:
            try:
                described_columns = self.run(f"PRAGMA table_info({quote_name(table)})", _MAX_SCHEMA_ROWS).rows
                columns = ", ".join(f"{name} {str(kind).lower()}".strip() for _, name, kind, *_ in described_columns)
            except QueryFailed as error:  # a view of a table that was dropped
                columns = f"unusable: {error}"
            lines.append(f"{table}({columns})")
            keys = self.run(f"PRAGMA foreign_key_list({quote_name(table)})", _MAX_SCHEMA_ROWS).rows
            for _, _, target, column, target_column, *_ in sorted(keys):
                references.append(f"{table}.{column} → {target}.{target_column or 'its key'}")
        return "\n".join(lines + references) or "No tables."

    def close(self) -> None:
        """Interrupt a running statement and drop the copy."""
        with suppress(sqlite3.ProgrammingError):  # closed already
            self._connection.interrupt()
        with self._lock:
            self._connection.close()


def _count_cte_copies(query: str) -> int:
    """Upper bound on how often SQLite copies a part of the query before it checks the deadline.

    Every use of a common table expression is a copy of it: a chain of a few that each use the previous one several
    times can fill the memory.
    """

    def normalize(match: re.Match[str]) -> str:
        """A quoted name becomes a word, equal to the same name without quotes; a comment becomes a space."""
        if not match[1]:
            return " "
        name = match[1][1:-1]
        return f" {name if name.isidentifier() else 'q' + name.encode(errors='replace').hex()} "

    bare = _QUOTED_OR_COMMENT.sub(normalize, query).lower()
    uses = Counter(re.findall(_WORD, bare))
    return math.prod(max(1, uses[name] - 1) for name in _CTE_NAME.findall(bare))


def run_query(image: bytes, query: str, *, seconds: float, max_rows: int) -> QueryResult:
    """Run a query on a fresh read-only copy. Raises QueryFailed."""
    copy = Database(image, seconds=seconds, read_only=True)
    try:
        return copy.run(query, max_rows)
    finally:
        copy.close()


def quote_name(name: str) -> str:
    """Quote an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def build_image(fill: Callable[[sqlite3.Connection], object]) -> bytes:
    """Return the image of a database that `fill` populates."""
    connection = sqlite3.connect(":memory:")
    try:
        fill(connection)
        connection.commit()
        return connection.serialize()
    finally:
        connection.close()


def read_file(path: str) -> bytes:
    """Return the image of a database file, without writing to its folder. Raises DataError."""
    try:
        source = sqlite3.connect(f"file:{path.replace('?', '%3f').replace('#', '%23')}?mode=ro", uri=True)
    except sqlite3.Error as error:
        raise DataError(f"{path} cannot be opened: {error}") from error
    try:
        image = build_image(source.backup)
    except sqlite3.Error as error:
        raise DataError(f"{path} is no SQLite database that can be read: {error}") from error
    finally:
        source.close()
    return image[:18] + b"\1\1" + image[20:]  # an in-memory copy has no write-ahead log, even if the file had one


# ── comparison of results ──

_DIGITS = 6
"""Significant digits that equal numbers share."""
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|/\*.*?\*/", re.DOTALL)
_PARENTHESES = re.compile(r"\([^()]*\)")
_ORDER_BY = re.compile(r"\border\s+by\b", re.IGNORECASE)


def has_order_by(query: str) -> bool:
    """Whether a query has an ORDER BY outside parentheses."""
    bare = _QUOTED.sub(" ", query)
    while (shorter := _PARENTHESES.sub(" ", bare)) != bare:
        bare = shorter
    return bool(_ORDER_BY.search(bare))


def equal_rows(rows: Sequence[Row], gold: Sequence[Row], *, ordered: bool) -> bool:
    """Whether the rows are equal, as multisets or in order. Numbers may differ by rounding."""

    def equal_values(value: Any, other: Any) -> bool:
        if isinstance(value, int | float) and isinstance(other, int | float):
            return value == other or math.isclose(value, other, rel_tol=10.0**-_DIGITS, abs_tol=1e-9)
        return type(value) is type(other) and bool(value == other)

    if len(rows) != len(gold):
        return False
    if not ordered:
        rows, gold = sorted(rows, key=_row_key), sorted(gold, key=_row_key)
    return all(
        len(row) == len(other) and all(map(equal_values, row, other)) for row, other in zip(rows, gold, strict=True)
    )


def row_overlap(rows: Sequence[Row], gold: Sequence[Row], *, ordered: bool) -> float:
    """Intersection over union of the rows as multisets; if `ordered`, times Kendall's tau of the common rows (≥ 0)."""
    row_keys, gold_keys = [_row_key(row) for row in rows], [_row_key(row) for row in gold]
    common, union = Counter(row_keys) & Counter(gold_keys), Counter(row_keys) | Counter(gold_keys)
    if not union:
        return 1.0
    iou = common.total() / union.total()
    if not ordered:
        return iou
    # Positions in `gold` of the common rows. Equal rows are paired in order.
    positions: dict[Row, deque[int]] = defaultdict(deque)
    for position, row in enumerate(gold_keys):
        positions[row].append(position)
    seen, inversions = list[int](), 0
    for row in row_keys:
        if positions.get(row):
            at = bisect(seen, position := positions[row].popleft())
            inversions += len(seen) - at
            seen.insert(at, position)
    pairs = len(seen) * (len(seen) - 1) // 2
    return iou * max(0.0, 1.0 - 2.0 * inversions / pairs) if pairs else iou


def _row_key(row: Row) -> Row:
    """A sort key over values of all types, equal for numbers that differ by rounding."""

    def key(value: Any) -> tuple[str, Any]:
        if value is None:
            return "", 0
        if isinstance(value, int | float):
            return "number", float(f"{value:.{_DIGITS - 1}e}") + 0.0
        return type(value).__name__, value

    return tuple(map(key, row))
