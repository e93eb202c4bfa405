"""What a database has: its tables, columns and references, in as few words as a model needs."""

from __future__ import annotations

from agentfly.environments.sql.database import Database, QueryFailed

_MOST = 500
"""Tables, and columns of a table, that are told."""
_TABLES = "SELECT name FROM sqlite_schema WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"


def schema(database: Database) -> str:
    """A line for each table, `pilots(id integer, name text)`, and one for each reference from one to another."""
    tables = [str(name) for (name,) in database.run(_TABLES, _MOST).rows]
    lines = [f"{name}({_columns(database, name)})" for name in tables]
    return "\n".join([*lines, *(line for name in tables for line in _references(database, name))]) or "No tables."


def _columns(database: Database, table: str) -> str:
    try:
        found = database.run(f"PRAGMA table_info({_quoted(table)})", _MOST).rows
    except QueryFailed as error:  # a view of a table that was dropped
        return f"unusable: {error}"
    return ", ".join(f"{name} {str(kind).lower()}".strip() for _, name, kind, *_ in found)


def _references(database: Database, table: str) -> list[str]:
    found = database.run(f"PRAGMA foreign_key_list({_quoted(table)})", _MOST).rows
    return [f"{table}.{own} → {other}.{theirs or 'its key'}" for _, _, other, own, theirs, *_ in sorted(found)]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
