"""The chains of all sources in a SQLite file: one row per chain, and the words of its messages for full-text search.

A row has what the table shows and what filters read, and the place of the chain's line in its file; the chain itself
is read from there when it is opened. `update` reads only what was written since the last call, so that a
running run is followed, and the index of an earlier call is continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from agentfly.errors import ConfigError, DataError, describe
from agentfly.models.cache import cache_root
from agentfly.runs.files import lock_file
from agentfly.runs.summary import ChainSummary
from agentfly.trajectory import Trajectory
from agentfly.view.sources import DAMAGE, ChainFile, Source

_LOG = logging.getLogger(__name__)
_VERSION = 3
"""Of the schema and of what is stored in it; part of the file name."""
_BATCH = 500
"""Chains in one transaction."""
_COLUMNS = (
    "source", "step", "held_out", "greedy", "grp", "chain", "task", "digest", "reward", "stop", "treatment", "failure",
    "tools", "turns", "calls", "bad_calls", "sampled", "tokens", "seconds", "trained", "preview", "file", "offset",
    "length",
)  # fmt: skip
_SHOWN = ("id", *_COLUMNS[:-3])
_SORTS = {
    "order": "source, step, held_out, grp, chain",
    **{name: name for name in ("reward", "turns", "calls", "bad_calls", "sampled", "seconds")},
}
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS files (
    id INTEGER PRIMARY KEY, path TEXT UNIQUE, source INTEGER, size INTEGER, changed INTEGER, inode INTEGER,
    done INTEGER
);
CREATE TABLE IF NOT EXISTS chains (id INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_COLUMNS)});
CREATE INDEX IF NOT EXISTS chains_order ON chains (source, step, held_out, grp, chain);
CREATE INDEX IF NOT EXISTS chains_file ON chains (file);
CREATE INDEX IF NOT EXISTS chains_digest ON chains (digest);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (text, content = '', columnsize = 0);
"""
# Rows of removed chains stay in `words`, since this SQLite cannot delete from an index without content: ids are never
# used twice, and every search joins with `chains`.


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A chain of the index and the line that it was read from."""

    row: dict[str, Any]
    value: dict[str, Any]
    """`trajectory`, and in a run `advantages` and `trained`."""


class ChainIndex:
    """The chains of the sources, with filters. Close it, or use `with`."""

    def __init__(self, sources: Sequence[Source], folder: Path | None = None) -> None:
        """folder: where the index is kept; None is the user's cache folder.

        A second viewer of the same sources, and one that cannot write there, uses a temporary file.
        """
        self.sources = {source.number: source for source in sources}
        self.progress = 0.0
        """Fraction of the files' bytes that the current `update` has read; 1 when it is done."""
        self.changes = 0
        """Increases whenever chains were added or removed."""
        self.problems: dict[str, str] = {}
        """Files that cannot be read, by path; each is tried again when it changes."""
        self._failed: dict[str, tuple[int, int, int]] = {}
        self._closing = threading.Event()
        self._release = contextlib.ExitStack()
        path = self._open_file(sources, cache_root().parent / "view" if folder is None else folder)
        self._writer = self._connect(path)
        try:
            self._writer.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self._release.close()
            raise ConfigError(f"the index {path} cannot be used ({error}); delete it, and start again") from error
        self._reader = self._connect(path)
        self._reading = threading.Lock()
        self._facets: tuple[int, dict[str, Any]] = (-1, {})

    def _open_file(self, sources: Sequence[Source], folder: Path) -> Path:
        key = json.dumps([str(source.path) for source in sources])
        name = f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{_VERSION}.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock: IO[str] = self._release.enter_context((folder / f"{name}.lock").open("w"))
            lock_file(lock)
            return folder / name
        except OSError as error:
            _LOG.info("the index in %s is in use or cannot be written (%s); using a temporary one", folder, error)
            return Path(self._release.enter_context(tempfile.TemporaryDirectory(prefix="agentfly-view-"))) / name

    def _connect(self, path: Path) -> sqlite3.Connection:
        connection = self._release.enter_context(contextlib.closing(sqlite3.connect(path, check_same_thread=False)))
        connection.execute("PRAGMA cache_size = -65536")  # 64 MiB
        return connection

    # ── following the files ──

    def update(self) -> None:
        """Add the chains that were written since the last call, and remove those of files that are gone or replaced."""
        columns = "path, id, size, changed, inode, done"
        indexed_files = {row[0]: row[1:] for row in self._writer.execute(f"SELECT {columns} FROM files")}
        files = {str(file.path): (source, file) for source in self.sources.values() for file in source.chain_files()}
        for path in indexed_files.keys() - files.keys():
            self._remove_file(indexed_files[path][0])
        work = []
        for path, (source, file) in files.items():
            number, *indexed_state, done = indexed_files.get(path, (None, 0, 0, 0, 0))
            try:
                state = file.state
            except FileNotFoundError:
                continue  # removed since it was listed
            if state in (tuple(indexed_state), self._failed.get(path)):
                continue
            # A file that was replaced or cut has other chains at the old offsets: index it from its start.
            if number is not None and (not file.grows or state[0] < done or state[2] != indexed_state[2]):
                self._remove_file(number)
                done = 0
            work.append((source, file, state, done))
        whole = sum(state[0] - done for *_, state, done in work)
        read = 0
        for source, file, state, done in work:
            self.progress = read / max(whole, 1)
            path = str(file.path)
            try:
                self._add_chains(source, file, state, done=done)
                self.problems.pop(path, None)
            except sqlite3.OperationalError:  # such as a full disk: not a fault of the file
                self._writer.rollback()
                raise
            except (*DAMAGE, sqlite3.Error) as error:  # sqlite3.Error: a value that is no number or text
                self._writer.rollback()
                self._failed[path] = state
                self.problems[path] = describe(error)
            read += state[0] - done
        self.progress = 1.0

    def _add_chains(self, source: Source, file: ChainFile, state: tuple[int, int, int], *, done: int) -> None:
        """Index a file from the offset `done` on."""
        insert = "INSERT INTO files VALUES (NULL, ?, ?, 0, 0, ?, 0) ON CONFLICT DO NOTHING"
        self._writer.execute(insert, (str(file.path), source.number, state[2]))
        (number,) = self._writer.execute("SELECT id FROM files WHERE path = ?", (str(file.path),)).fetchone()
        marks = ", ".join("?" * len(_COLUMNS))
        pending = 0
        for offset, line in file.lines(done):
            if self._closing.is_set():
                break
            done = offset + len(line)
            value = json.loads(line)
            trained = bool(value.get("trained"))
            chain = value if "segments" in value else value.get("trajectory")
            if chain is None:  # the settings of an evaluation, or a chain that JSON could not hold
                continue
            # Saved trajectories have no summaries.
            stored = value.get("summary")
            summary = ChainSummary.of(Trajectory.from_json(chain)) if stored is None else ChainSummary(**stored)
            row = _row(summary)
            text = _clean(summary.text)
            greedy = source.is_greedy(summary.chain, held_out=file.held_out)
            origin = (source.number, file.step, int(file.held_out), greedy)
            cursor = self._writer.execute(
                f"INSERT INTO chains ({', '.join(_COLUMNS)}) VALUES ({marks})",
                (*origin, *row, trained, text.partition("\n")[0][:200], number, offset, len(line)),
            )
            self._writer.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", (cursor.lastrowid, text))
            pending += 1
            if pending % _BATCH == 0:
                # The offset is committed with its chains: an interrupted update continues from there.
                self._writer.execute("UPDATE files SET done = ? WHERE id = ?", (done, number))
                self._commit()
        complete = (0, 0) if self._closing.is_set() else state[:2]
        self._writer.execute("UPDATE files SET size=?, changed=?, done=? WHERE id=?", (*complete, done, number))
        self._commit()

    def _remove_file(self, number: int) -> None:
        self._writer.execute("DELETE FROM chains WHERE file = ?", (number,))
        self._writer.execute("DELETE FROM files WHERE id = ?", (number,))
        self._commit()

    def _commit(self) -> None:
        self._writer.commit()
        self.changes += 1

    # ── reading ──

    def select(
        self,
        filters: Mapping[str, str],
        *,
        sort: str = "order",
        descending: bool = False,
        offset: int = 0,
        limit: int = 100,
    ) -> tuple[int, list[dict[str, Any]]]:
        """The number of chains that pass all filters, and a page of their rows.

        Raises ConfigError for an unknown filter or sort key, or a value that does not fit.
        """
        if sort not in _SORTS:
            raise ConfigError(f"chains are sorted by {', '.join(_SORTS)}, not by {sort!r}")
        condition, values = build_condition(filters)
        order = ", ".join(f"{column} DESC" if descending else column for column in _SORTS[sort].split(", "))
        if sort == "reward":  # chains without one come last, either way
            order = f"reward IS NULL, {order}"
        columns = ", ".join(_SHOWN)
        with self._reading:
            (total,) = self._reader.execute(f"SELECT count(*) FROM chains WHERE {condition}", values).fetchone()
            query = f"SELECT {columns} FROM chains WHERE {condition} ORDER BY {order}, id LIMIT ? OFFSET ?"
            rows = self._reader.execute(query, (*values, limit, offset)).fetchall()
        return total, [dict(zip(_SHOWN, row, strict=True)) for row in rows]

    def facets(self) -> dict[str, Any]:
        """The values that filters can take: steps by source, stop reasons, tools, failures."""
        with self._reading:
            if self._facets[0] == self.changes:
                return self._facets[1]
            changes = self.changes

            def names(column: str) -> list[str]:
                rows = self._reader.execute(f"SELECT DISTINCT {column} FROM chains")
                return sorted({name for (names,) in rows for name in names.split("\n") if name})

            steps: dict[int, list[Any]] = {}
            for source, step, held_out, chains in self._reader.execute(
                "SELECT source, step, held_out, count(*) FROM chains GROUP BY source, step, held_out"
            ):
                steps.setdefault(source, []).append([step, held_out, chains])
            values = {"stop": names("stop"), "tool": names("tools")[:500], "failure": names("failure")}
            self._facets = (changes, {"steps": steps, **values})
            return self._facets[1]

    def read(self, numbers: Sequence[int]) -> list[StoredLine]:
        """The rows of chains, each with its stored line. Raises DataError if one of the chains does not exist."""
        marks = ", ".join("?" * len(numbers))
        query = f"""SELECT {", ".join(f"chains.{name}" for name in _SHOWN)}, path, offset, length
                    FROM chains JOIN files ON files.id = file WHERE chains.id IN ({marks})"""
        with self._reading:
            rows_by_id = {row[0]: row for row in self._reader.execute(query, list(numbers))}
        if missing := [number for number in numbers if number not in rows_by_id]:
            raise DataError(f"there is no chain {missing[0]}: its file was removed or rewritten; reload the list")
        out: dict[int, StoredLine] = {}
        # In the order of the file: a compressed file is read from its start for every step back.
        for path, rows in groupby(sorted(rows_by_id.values(), key=lambda row: row[-3:]), key=lambda row: row[-3]):
            chains_of_file = list(rows)
            lines = ChainFile(Path(path)).read([row[-2:] for row in chains_of_file])
            for row, line in zip(chains_of_file, lines, strict=True):
                value = {"trajectory": line} if "segments" in line else line
                out[row[0]] = StoredLine(dict(zip(_SHOWN, row, strict=False)), value)
        return [out[number] for number in numbers]

    def group_of(self, row: Mapping[str, Any]) -> list[int]:
        """The ids of the chains of a row's group, in order, its own included."""
        query = "SELECT id FROM chains WHERE source = ? AND step IS ? AND held_out = ? AND grp = ? ORDER BY chain, id"
        key = tuple(row[name] for name in ("source", "step", "held_out", "grp"))
        with self._reading:
            return [number for (number,) in self._reader.execute(query, key)]

    def stop(self) -> None:
        """End an `update` in another thread at its next chain; the next viewer continues from there."""
        self._closing.set()

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._reading:
            self._release.close()

    def __enter__(self) -> ChainIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


FILTERS: dict[str, tuple[str, str]] = {
    **{name: (name, "integer") for name in ("source", "step", "held_out", "trained")},
    "group": ("grp", "integer"),
    "task": ("task", "text"),
    "digest": ("digest", "text"),
    "stop": ("stop", "text"),
    "min_reward": ("reward", "at_least"),
    "max_reward": ("reward", "at_most"),
    "tool": ("tools", "has"),
    "failure": ("failure", "has"),
    "text": ("id", "words"),
}
"""The column and the comparison of each filter. An exported page has this table; `api.js` has its comparisons."""


def build_condition(filters: Mapping[str, str]) -> tuple[str, list[Any]]:
    """The WHERE clause of filters, and its values. Raises ConfigError for an unknown filter or a bad number."""
    conditions = ["1"]
    values: list[Any] = []
    for name, value in filters.items():
        if name not in FILTERS:
            raise ConfigError(f"there is no filter {name!r}; there are {', '.join(FILTERS)}")
        column, comparison = FILTERS[name]
        try:
            if comparison in ("integer", "text"):
                conditions.append(f"{column} = ?")
                values.append(int(value) if comparison == "integer" else value)
                if isinstance(values[-1], int) and abs(values[-1]) >= 2**63:
                    raise ConfigError(f"filter {name}={value!r:.80}: the number is too large")
            elif comparison in ("at_least", "at_most"):
                conditions.append(f"{column} IS NOT NULL AND {column} {'>=' if comparison == 'at_least' else '<='} ?")
                values.append(float(value))
            elif comparison == "has":  # a name between line breaks; any name with *
                conditions.append(f"{column} != ''" if value == "*" else f"instr({column}, ?)")
                values += [] if value == "*" else [f"\n{value}\n"]
            else:
                conditions.append(f"{column} IN (SELECT rowid FROM words WHERE words MATCH ?)")
                values.append(_search_query(value))
        except ValueError as error:
            raise ConfigError(f"filter {name}={value!r:.80}: a number is needed") from error
    return " AND ".join(conditions), values


def _search_query(text: str) -> str:
    """The FTS5 query for all words of a text, the last one as a prefix; words in double quotes are a phrase."""
    phrases = []
    for number, section in enumerate(text.replace("\0", " ").split('"')):
        phrases += [section] if number % 2 else section.split()
    if not (quoted := ['"' + phrase.replace('"', '""') + '"' for phrase in phrases if phrase.strip()]):
        raise ConfigError("the search is empty; give one or more words")
    return " ".join(quoted) + ("" if text.rstrip().endswith('"') else "*")


def _row(summary: ChainSummary) -> list[Any]:
    """The columns of a chain from `grp` to `seconds`: the fields of its summary in their order, without the text."""
    values = asdict(summary)
    del values["text"]
    values["failures"] = _join(summary.failures)
    values["tools"] = _join(name.replace("\n", " ") for name in summary.tools)
    return [_clean(value) if isinstance(value, str) else value for value in values.values()]


def _clean(text: str) -> str:
    """Text that SQLite can store: without zero bytes, and without halves of surrogate pairs."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _join(names: Iterable[str]) -> str:
    """Names, each between line breaks, so that `instr` finds one as a whole; empty if there are none."""
    lines = "\n".join(names)
    return f"\n{lines}\n" if lines else ""
