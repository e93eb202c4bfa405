"""Public data sets that are not shipped, found in the folder that AGENTFLY_DATA names.

Files may be packed (`.xz`, `.gz`). What is missing is named, with the place that it comes from.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from agentfly.errors import DataError

SPLITS = ("train", "validation", "test")
_OPENERS: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open}


def checked_split(split: str, splits: tuple[str, ...] = SPLITS) -> str:
    """The split, if there is one of that name."""
    if split not in splits:
        raise DataError(f"there is no split {split!r:.80}; there are {', '.join(splits)}")
    return split


def checked_count(count: int) -> None:
    """Refuse what is no number of tasks."""
    if not isinstance(count, int) or count < 0:
        raise DataError(f"a number of tasks is 0 or more, not {count!r:.40}")


@dataclass(frozen=True, slots=True)
class Source:
    """A public data set: what it is called, where it is got, and where it lies here."""

    name: str
    address: str
    """Where people get it, and how."""
    folder: str
    """Its folder in AGENTFLY_DATA."""

    def path(self) -> Path:
        """The folder that has, or should have, its files."""
        data = os.environ.get("AGENTFLY_DATA")
        if not data:
            raise DataError(
                f"{self.name} is not shipped: get it from {self.address} into a folder {self.folder}, "
                "and set AGENTFLY_DATA to the folder around that one"
            )
        return Path(data) / self.folder

    def find(self, *names: str) -> Path | None:
        """The first of these files that is there, packed or not."""
        folder = self.path()
        candidates = (folder / f"{name}{packed}" for name in names for packed in ("", *_OPENERS))
        return next((path for path in candidates if path.is_file()), None)

    def file(self, *names: str) -> Path:
        """The first of these files that is there; an error that names them where none is."""
        found = self.find(*names)
        if found is None:
            raise DataError(
                f"{self.path()} has no {' or '.join(names)} ({self.name}, packed or not); it comes from {self.address}"
            )
        return found


def opened(path: Path) -> IO[str]:
    """A text file, packed or not."""
    opener = _OPENERS.get(path.suffix, open)
    file: IO[str] = opener(path, "rt", encoding="utf-8")
    return file


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    try:
        with opened(path) as file:
            return json.load(file)
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_rows(path: Path, only: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSON list (`.json`), or of a file with one on each line; each after the words for its place.

    Lines without the text `only` are skipped unread.
    """
    if ".json" not in path.suffixes:
        yield from _lines(path, only)
        return
    rows = read_json(path)
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold a list of rows, not a {type(rows).__name__}")
    for number, row in enumerate(rows):
        yield _checked(row, f"{path}, row {number}")


def _lines(path: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with opened(path) as lines:
            for number, line in enumerate(lines, 1):
                if only in line and line.strip():
                    yield _checked(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is no JSON: {error}") from error


def _checked(row: Any, place: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise DataError(f"{place} is no row of columns: {row!r:.60}")
    return place, row
