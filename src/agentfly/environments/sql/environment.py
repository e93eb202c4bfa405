"""Databases to be asked: every chain has its own copy, in memory, and may do with it what it likes.

What is submitted is judged on a copy that nobody has touched, and so is the right query, which the model never sees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from agentfly.environment import Environment
from agentfly.environments.sql import sources
from agentfly.environments.sql.database import Answer, Database, QueryFailed
from agentfly.environments.sql.drawn import LEVELS
from agentfly.environments.sql.results import orders, overlap, same
from agentfly.environments.sql.schema import schema
from agentfly.errors import ConfigError, DataError
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

_FENCE = re.compile(r"```[ \t]*(?:sql|sqlite)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_QUERY = re.compile(r"\s*(?:select|with|values)\b", re.IGNORECASE)
_MOST_COMPARED = 50_000
"""Rows of a result that are looked at."""
_GOLD_SECONDS = 30.0
_KEPT = 256
"""Right results, those used last: the chains of a group ask for the same ones."""


class SQL(Environment):
    """A SQLite database, and a question that one query answers."""

    scored_by = "sql_match"
    seconds: ClassVar[float] = 2.0
    """That a statement of the model's may run."""
    most_rows: ClassVar[int] = 20
    """Rows of a result that are shown."""
    widest: ClassVar[int] = 200
    """Characters of a value that are shown."""
    _database: Database | None = None

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, levels: Sequence[int] = LEVELS
    ) -> list[dict[str, Any]]:
        """Questions about drawn databases: of one table (level 1), two (2) or four (3), which take turns."""
        from agentfly.environments.sql import questions  # a world with tasks of its own does without

        return questions.draw_tasks(split, count, seed, levels)

    async def reset(self, task: Task) -> None:
        """A fresh copy of the database of the column `database`."""
        if "database" not in task.columns:
            raise DataError(
                f"task {task.id!r} has no column 'database'; SQL.draw_tasks and spider_tasks make such rows"
            )
        self._column, self._gold = task.columns["database"], task.columns.get("gold")
        await self.close()
        self._database = await call(_opened, self._column, self.seconds)
        self.submitted: str | None = None
        """The query that was submitted; None: none was."""
        self.looked = False
        """Whether the schema was asked for."""

    async def close(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            await call(database.close)

    @tool
    async def sql_schema(self) -> str:
        """Show the tables of the database, with their columns and what refers to what."""
        assert self._database is not None
        self.looked = True
        try:
            return str(await call(schema, self._database))
        except QueryFailed as error:
            return f"Error: {error}."

    @tool
    async def sql_query(self, query: str) -> str:
        """Run one SQL statement (SQLite) on your copy of the database, and show what it gives.

        Args:
            query: The statement.
        """
        assert self._database is not None
        try:
            return self._shown(await call(self._database.run, query, self.most_rows))
        except QueryFailed as error:
            return f"Error: {error}."

    @tool(ends_chain=True)
    async def submit_query(self, query: str) -> str:
        """Submit the query whose result answers the question. Nothing can be done after it.

        Args:
            query: One SELECT statement. It is run on a fresh copy of the database.
        """
        self.submitted = query
        return "Submitted."

    def _shown(self, answer: Answer) -> str:
        if not answer.columns:
            return f"Done: {answer.changed} rows changed."
        lines = [" | ".join(answer.columns), *(" | ".join(map(self._value, row)) for row in answer.rows)]
        if answer.more:
            lines.append(f"(further rows: only the first {len(answer.rows)} are shown)")
        return "\n".join(lines if answer.rows else [*lines, "(no rows)"])

    def _value(self, value: Any) -> str:
        text = "NULL" if value is None else value if isinstance(value, str) else repr(value)
        return text if len(text) <= self.widest else f"{text[: self.widest]}…"

    async def judged(self, answer: str = "") -> dict[str, Any]:
        """What the submitted query is worth, or the one in the final answer where none was submitted.

        `match`: whether its result is the right one; `iou`: how much of it is; `ran`: whether it is a query at all.
        """
        query = query_in(answer) if self.submitted is None else self.submitted
        if not isinstance(self._gold, str):
            raise DataError(f"the row needs a query in the column 'gold', not {self._gold!r:.80}")
        found: dict[str, Any] = await call(_judged, self._column, query, self._gold, self.seconds)
        return found

    def expert(self) -> ToolCall | str:
        """Look at the schema, then submit the right query."""
        if not isinstance(self._gold, str):
            raise ConfigError("this task has no expert: its row has no column 'gold'")
        if self.submitted is not None:
            return "Done."
        return ToolCall("submit_query", {"query": self._gold}) if self.looked else ToolCall("sql_schema", {})


def query_in(answer: str) -> str:
    """The query in an answer: its last block of code, or all of it where it is one; else nothing."""
    blocks = _FENCE.findall(answer)
    query = str(blocks[-1] if blocks else answer)
    return query if _QUERY.match(query) else ""


def _opened(column: Any, seconds: float) -> Database:
    return Database(sources.image(column), seconds=seconds)


def _judged(column: Any, query: str, gold: str, seconds: float) -> dict[str, Any]:
    """Compare on the database itself and on its twins."""
    real = sources.image(column)
    right, ordered = _right(real, gold), orders(gold)
    told = {"match": False, "iou": 0.0, "ran": False, "empty": not right.rows, "wrong": ""}
    try:
        given = _run(real, query, seconds)
        pairs = [(given, right)]
        pairs += [(_run(twin, query, seconds), _right(twin, gold)) for twin in sources.twins(column, gold)]
    except QueryFailed as error:
        return {**told, "wrong": str(error)}
    if not given.read and right.read:
        return {**told, "ran": True, "wrong": "it looks at none of the tables"}
    if not right.rows and not _is_alike(given, right):
        return {**told, "ran": True, "wrong": "it is empty, as it should be, but of something else"}
    match = all(same(ours.rows, theirs.rows, ordered=ordered) for ours, theirs in pairs)
    iou = min(overlap(ours.rows, theirs.rows, ordered=ordered) for ours, theirs in pairs)
    return {**told, "match": match, "iou": iou, "ran": True}


def _is_alike(given: Answer, right: Answer) -> bool:
    """Whether two results without rows may be of the same thing: `SELECT 1 WHERE 0` is no answer to anything."""
    return bool(given.rows) or (len(given.columns) == len(right.columns) and given.read >= right.read)


@lru_cache(_KEPT)
def _right(image: bytes, gold: str) -> Answer:
    try:
        return _run(image, gold, _GOLD_SECONDS)
    except QueryFailed as error:
        raise DataError(f"the query of the column 'gold' fails: {error}: {gold:.200}") from error


def _run(image: bytes, query: str, seconds: float) -> Answer:
    """What a query gives on a fresh copy that it cannot write to."""
    copy = Database(image, seconds=seconds, read_only=True)
    try:
        answer = copy.run(query, _MOST_COMPARED)
    finally:
        copy.close()
    if not answer.columns:
        raise QueryFailed("it is no query: it gives no rows")
    return answer
