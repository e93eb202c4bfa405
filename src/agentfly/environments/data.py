"""Tasks sampled from a seed, and public datasets read from the folder that AGENTFLY_DATA names.

Each sampled task is in one split only: a hash of its content decides which, so no two splits share a task, whatever the
seeds. Dataset files are not shipped and may be compressed (`.xz`, `.gz`). The error for a missing one says where to get
it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import sqlite3
import tomllib
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from random import Random
from typing import IO, Any

from agentfly.errors import DataError
from agentfly.types import Task

SPLITS = ("train", "validation", "test")
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}
TENTHS = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
"""Tenths of all tasks in each split."""
_MAX_REJECTED = 2000
"""Consecutive draws without a new task after which sampling gives up."""


def validate_split(split: str, splits: tuple[str, ...] = SPLITS) -> str:
    """Return the split, or raise DataError if there is none of that name."""
    if split not in splits:
        raise DataError(f"there is no split {split!r:.80}; there are {', '.join(splits)}")
    return split


def validate_count(count: int) -> None:
    """Raise DataError unless `count` is a number of tasks."""
    if not isinstance(count, int) or count < 0:
        raise DataError(f"a number of tasks is 0 or more, not {count!r:.40}")


def get_column(task: Task, name: str, hint: str) -> Any:
    """Return the column of a task, or raise DataError. hint: says what makes rows with this column."""
    if name not in task.columns:
        raise DataError(f"task {task.id!r} has no column {name!r}; {hint}")
    return task.columns[name]


def query_sqlite(path: Path, statement: str, *values: str) -> list[tuple[str, ...]]:
    """Run a statement on an SQLite file, which several processes may share, and return its rows."""
    with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
        return connection.execute(statement, values).fetchall()


@cache
def load_toml(package: str, name: str) -> dict[str, Any]:
    """Read a TOML file of a package. The result is shared: do not change it."""
    return tomllib.loads((resources.files(package) / name).read_text(encoding="utf-8"))


def in_dataset_split(key: str, split: str) -> bool:
    """Whether a row of a public dataset is in a split: the test file is not divided, and of the training file a
    twentieth, chosen by the checksum of a key, is for validation."""
    return split == "test" or (zlib.crc32(key.encode()) % 20 == 0) == (split == "validation")


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A public dataset."""

    name: str
    address: str
    """Where to get it, and which files."""
    folder: str
    """Its folder in AGENTFLY_DATA."""

    def path(self) -> Path:
        """Return the folder of its files."""
        data = os.environ.get("AGENTFLY_DATA")
        if not data:
            raise DataError(
                f"{self.name} is not shipped: get it from {self.address} into a folder {self.folder}, "
                "and set AGENTFLY_DATA to the folder that contains it"
            )
        return Path(data) / self.folder

    def find(self, *names: str) -> Path | None:
        """Return the first of these files that exists, compressed or not. None if none does."""
        folder = self.path()
        candidates = (folder / f"{name}{suffix}" for name in names for suffix in ("", *_OPENERS))
        return next((path for path in candidates if path.is_file()), None)

    def file(self, *names: str) -> Path:
        """Return the first of these files that exists, or raise DataError."""
        path = self.find(*names)
        if path is None:
            raise DataError(
                f"{self.path()} has no {' or '.join(names)} ({self.name}, compressed or not); "
                f"get it from {self.address}"
            )
        return path


def open_text(path: Path) -> IO[str]:
    """Open a text file, compressed or not."""
    opener = _OPENERS.get(path.suffix, open)
    file: IO[str] = opener(path, "rt", encoding="utf-8")
    return file


def read_json(path: Path) -> Any:
    """Read a JSON file, compressed or not."""
    try:
        with open_text(path) as file:
            return json.load(file)
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_rows(path: Path, only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a JSON list (`.json`) or of a JSON lines file, each with its place for error messages.

    Lines that do not contain the text `only` are skipped without parsing.
    """
    if ".json" in path.suffixes:
        rows = read_json(path)
        if not isinstance(rows, list):
            raise DataError(f"{path} must hold a list of rows, not a {type(rows).__name__}")
        for number, row in enumerate(rows):
            yield _validate_row(row, f"{path}, row {number}")
        return
    try:
        with open_text(path) as lines:
            for number, line in enumerate(lines, 1):
                if only not in line or not line.strip():
                    continue
                source = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{source} is not JSON: {error}") from error
                yield _validate_row(row, source)
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _validate_row(row: Any, source: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise DataError(f"{source} is not an object with columns: {row!r:.60}")
    return source, row


def belongs_to(content: str, split: str) -> bool:
    """Whether a task with this content is in the split."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") % 10 in TENTHS[split]


def sample_tasks(
    name: str,
    split: str,
    count: int,
    seed: int,
    draw: Callable[[Random, int], tuple[str, dict[str, Any]] | None],
    *,
    allow_repeats: bool = False,
) -> list[dict[str, Any]]:
    """Sample rows of a split. A larger `count` begins with the same rows.

    Args:
        name: The environment's name, part of the ids.
        split: `train`, `validation` or `test`.
        count: Number of rows.
        seed: Seed of the random numbers.
        draw: Draws the row of a number: its content, a text that no other task has, and its columns. It is called
            again if it returns None, or content of another split or of an earlier row.
        allow_repeats: Whether rows may have the same content.
    """
    validate_split(split)
    validate_count(count)
    random = Random(f"{name} {split} {seed}")
    rows, contents = list[dict[str, Any]](), set[str]()
    rejected = 0
    while len(rows) < count:
        content, columns = draw(random, len(rows)) or ("", {})
        if columns and belongs_to(content, split) and (allow_repeats or content not in contents):
            contents.add(content)
            rows.append({"id": f"{name}/{split}/{seed}/{len(rows)}", **columns})
            rejected = 0
        elif (rejected := rejected + 1) >= _MAX_REJECTED:
            raise DataError(f"there are {len(rows)} {split} tasks of {name} or little more, not {count}")
    return rows
