"""SQL environment: each chain queries and modifies its own in-memory copy of a database. And its rewards.

The submitted query and the gold query, which the model never sees, are run on fresh copies.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, ClassVar

from agentfly.environment import Environment
from agentfly.environments.data import get_column
from agentfly.environments.sql import tasks
from agentfly.environments.sql.database import (
    Database,
    QueryFailed,
    QueryResult,
    equal_rows,
    has_order_by,
    row_overlap,
    run_query,
)
from agentfly.environments.sql.images import GOLD_SECONDS, load_image, load_twins
from agentfly.errors import ConfigError, DataError
from agentfly.scoring import reward
from agentfly.threads import call
from agentfly.tooling import tool
from agentfly.types import Task, ToolCall

_CODE_BLOCK = re.compile(r"```[ \t]*(?:sql|sqlite)?[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_QUERY_START = re.compile(r"\s*(?:select|with|values)\b", re.IGNORECASE)
_MAX_COMPARED_ROWS = 50_000


class SQL(Environment):
    """A SQLite database, and a question that one query answers."""

    scored_by = "sql_match"
    seconds: ClassVar[float] = 2.0
    """Time limit of a statement of the model."""
    most_rows: ClassVar[int] = 20
    """Number of rows of a result that are shown."""
    widest: ClassVar[int] = 200
    """Number of characters of a value that are shown."""
    _database: Database | None = None

    draw_tasks = staticmethod(tasks.draw_tasks)

    async def reset(self, task: Task) -> None:
        """Open a fresh copy of the database that the column `database` names."""
        self._column = get_column(task, "database", "SQL.draw_tasks and spider_tasks make such rows")
        self._gold = task.columns.get("gold")
        await self.close()
        self._database = await call(lambda: Database(load_image(self._column), seconds=self.seconds))
        self.submitted: str | None = None
        """The submitted query. None before."""
        self.schema_shown = False
        """Whether the model has called `sql_schema`."""

    async def close(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            await call(database.close)

    @tool
    async def sql_schema(self) -> str:
        """Show the tables of the database, with their columns and what refers to what."""
        assert self._database is not None
        self.schema_shown = True
        try:
            return str(await call(self._database.describe_schema))
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
            result = await call(self._database.run, query, self.most_rows)
        except QueryFailed as error:
            return f"Error: {error}."
        if not result.columns:
            return f"Done: {result.changed} rows changed."
        lines = [" | ".join(result.columns)]
        for row in result.rows:
            texts = ["NULL" if value is None else value if isinstance(value, str) else repr(value) for value in row]
            lines.append(" | ".join(text if len(text) <= self.widest else f"{text[: self.widest]}…" for text in texts))
        if result.truncated:
            lines.append(f"(further rows: only the first {len(result.rows)} are shown)")
        return "\n".join(lines if result.rows else [*lines, "(no rows)"])

    @tool(ends_chain=True)
    async def submit_query(self, query: str) -> str:
        """Submit the query whose result answers the question. Nothing can be done after it.

        Args:
            query: One SELECT statement. It is run on a fresh copy of the database.
        """
        self.submitted = query
        return "Submitted."

    async def evaluate(self, answer: str = "") -> dict[str, Any]:
        """Compare the submitted query, or else the query in the final answer, with the gold query.

        Returns `match` (the results are equal), `iou` (their overlap), `ran` (it is a query that runs), `empty` (the
        gold result is) and `wrong` (the reason, if known).
        """
        if not isinstance(self._gold, str):
            raise DataError(f"the row needs a query in the column 'gold', not {self._gold!r:.80}")
        query = extract_query(answer) if self.submitted is None else self.submitted
        scores: dict[str, Any] = await call(_compare, self._column, query, gold=self._gold, seconds=self.seconds)
        return scores

    async def snapshot(self) -> dict[str, Any]:
        """The chain's copy of the database, and what it has called."""
        assert self._database is not None
        image = await call(self._database.serialize)
        return {"image": image, "submitted": self.submitted, "schema_shown": self.schema_shown}

    async def restore(self, state: dict[str, Any]) -> None:
        """Open a copy of the database as it was."""
        await self.close()
        self._database = await call(lambda: Database(state["image"], seconds=self.seconds))
        self.submitted = state["submitted"]
        self.schema_shown = state["schema_shown"]

    def expert(self) -> ToolCall | str:
        """Call `sql_schema`, then submit the gold query."""
        if not isinstance(self._gold, str):
            raise ConfigError("this task has no expert: its row has no column 'gold'")
        if self.submitted is not None:
            return "Done."
        return ToolCall("submit_query", {"query": self._gold}) if self.schema_shown else ToolCall("sql_schema", {})


def extract_query(answer: str) -> str:
    """Return the last code block of an answer, or all of it, if that is a query; otherwise an empty string."""
    blocks = _CODE_BLOCK.findall(answer)
    query = str(blocks[-1] if blocks else answer)
    return query if _QUERY_START.match(query) else ""


def _compare(column: Any, query: str, *, gold: str, seconds: float) -> dict[str, Any]:
    """Compare the results of two queries on the database and on its twins."""
    image = load_image(column)
    expected, ordered = _run_gold(image, gold), has_order_by(gold)
    scores = {"match": False, "iou": 0.0, "ran": False, "empty": not expected.rows, "wrong": ""}
    try:
        result = _run_select(image, query, seconds)
        pairs = [(result, expected)]
        pairs += [(_run_select(twin, query, seconds), _run_gold(twin, gold)) for twin in load_twins(column, gold)]
    except QueryFailed as error:
        return {**scores, "wrong": str(error)}
    if not result.tables and expected.tables:
        return {**scores, "ran": True, "wrong": "it looks at none of the tables"}
    # Two empty results must at least have the same columns and tables: `SELECT 1 WHERE 0` answers nothing.
    is_similar = len(result.columns) == len(expected.columns) and result.tables >= expected.tables
    if not expected.rows and not result.rows and not is_similar:
        return {**scores, "ran": True, "wrong": "it is empty, as it should be, but of something else"}
    match = all(equal_rows(result.rows, gold.rows, ordered=ordered) for result, gold in pairs)
    iou = min(row_overlap(result.rows, gold.rows, ordered=ordered) for result, gold in pairs)
    return {**scores, "match": match, "iou": iou, "ran": True}


@lru_cache(256)  # the chains of a group have the same gold query
def _run_gold(image: bytes, gold: str) -> QueryResult:
    try:
        return _run_select(image, gold, GOLD_SECONDS)
    except QueryFailed as error:
        raise DataError(f"the query of the column 'gold' fails: {error}: {gold:.200}") from error


def _run_select(image: bytes, query: str, seconds: float) -> QueryResult:
    """Run a query on a fresh read-only copy. Raises QueryFailed, also for a statement that is not a query."""
    result = run_query(image, query, seconds=seconds, max_rows=_MAX_COMPARED_ROWS)
    if not result.columns:
        raise QueryFailed("it is not a query: it returns no rows")
    return result


@reward
async def sql_match(prediction: str, env: SQL) -> dict[str, Any]:
    """1 if the result of the submitted query equals that of the gold query, otherwise 0."""
    scores = await env.evaluate(prediction)
    return {"reward": float(scores.pop("match")), **scores}


@reward
async def sql_iou(prediction: str, env: SQL) -> dict[str, Any]:
    """Intersection over union of the rows of both results, as in InterCode."""
    scores = await env.evaluate(prediction)
    return {"reward": scores["iou"], **scores}
