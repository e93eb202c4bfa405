"""Dataset files: each reader yields the rows of a file with their places.

.json              a list of rows
.jsonl  .ndjson    one row per line; blank lines are skipped
.csv               a header, then one row per record; every cell is text, `messages` is JSON
.parquet           requires pyarrow
all files but parquet may be compressed: .jsonl.gz, .json.xz, …

A folder of task folders (`task_folders.py`) yields a row for each of them. `formats.py` decides what a row means.
"""

from __future__ import annotations

import csv
import datetime
import difflib
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from agentfly.data import task_folders
from agentfly.errors import ConfigError, DataError, install_command
from agentfly.types import Image

LocatedRow = tuple[str, Any]
"""The place of a row in its file, and its value: a mapping, or the DataError of a row that cannot be parsed."""
Reader = Callable[[Path], Iterator[LocatedRow]]

_BOM = b"\xef\xbb\xbf"
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def find_reader(path: Path) -> Reader:
    """Choose the reader by the suffix, or that of task folders.

    A missing file is a DataError that lists files with similar names.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in _OPENERS
    if compressed:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if task_folders.find_task_folders(path):
        return task_folders.read_rows
    if path.is_dir() or not path.exists():
        folder = path if path.is_dir() else path.parent
        near: list[str] = []
        if folder.is_dir():
            names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
            data_files = [name for name in names if any(s.lower() in _READERS for s in Path(name).suffixes)]
            near = difflib.get_close_matches(path.name, names, 5) or data_files[:5]
        hint = f"; near it are {', '.join(near)}" if near else ""
        if path.is_dir():
            raise DataError(f"{path} is a folder without task folders (NAME/task.toml); name one file in it{hint}")
        missing = "" if folder.is_dir() else f": there is no folder {folder}"
        raise DataError(f"no file {path}{missing}{hint}")
    if suffix not in _READERS or (compressed and suffix == ".parquet"):
        raise DataError(f"{path} has no known suffix; known are {', '.join(_READERS)}, also with .gz or .xz")
    return _READERS[suffix]


def describe_value(value: object) -> str:
    if value is None or value == "":
        return "nothing"
    return f"{value!r:.60}" if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


def _open(path: Path) -> BinaryIO:
    opener = _OPENERS.get(path.suffix.lower())
    return cast(BinaryIO, opener(path, "rb") if opener else path.open("rb"))


def _loads(text: str | bytes) -> Any:
    """Parse JSON; ValueError for NaN and Infinity, which Python's parser accepts, and for nesting without end."""

    def reject(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON; write null")

    try:
        return json.loads(text, parse_constant=reject)
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply ({error})") from error


def _read_json(path: Path) -> Iterator[LocatedRow]:
    with _open(path) as file:
        text = file.read().removeprefix(_BOM).decode()
    if not text.strip():
        return
    try:
        rows = _loads(text)
    except ValueError as error:
        hint = "; for one row per line (JSON lines), name it .jsonl" if "Extra data" in str(error) else ""
        raise DataError(f"{path} is not JSON: {error}{hint}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold a list of rows, not {describe_value(rows)}")
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _read_jsonl(path: Path) -> Iterator[LocatedRow]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if not line.strip():
                continue
            row: Any
            try:
                row = _loads(line.decode())
            except UnicodeDecodeError as error:
                row = DataError(f"it is not UTF-8 text: {error}")
            except ValueError as error:
                row = DataError(f"it is not JSON: {error}")
            yield f"line {number}", row


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    """Every cell is text or, if empty, None, so that an answer "2" equals the prediction "2"; `messages` is JSON."""
    csv.field_size_limit(sys.maxsize)  # 128 KiB by default, which a long prompt or a data: URI exceeds
    header: list[str] = []
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
        records = csv.reader(file, strict=True)
        try:
            for record in records:
                line = f"line {records.line_num}"
                if not record:
                    continue
                if not header:
                    header = record
                    if duplicates := sorted({name for name in header if header.count(name) > 1}):
                        raise DataError(
                            f"{path}, line 1: the header names {', '.join(map(repr, duplicates))} more than once"
                        )
                    continue
                if len(record) != len(header):
                    yield line, DataError(f"{len(record)} cells under a header of {len(header)}")
                    continue
                row: dict[str, Any] = {name: cell or None for name, cell in zip(header, record, strict=True)}
                try:
                    if row.get("messages") is not None:
                        row["messages"] = _loads(row["messages"])
                except ValueError as error:
                    yield line, DataError(f"'messages' is not JSON: {error}")
                else:
                    yield line, row
        except csv.Error as error:
            yield f"line {records.line_num}", DataError(f"it is not CSV: {error}")


def _read_parquet(path: Path) -> Iterator[LocatedRow]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow to be read: {install_command('parquet')}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, columns in enumerate(rows):
                yield f"row {number}", convert_arrow_row(columns)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def convert_arrow_row(columns: Mapping[str, Any]) -> dict[str, Any] | DataError:
    """A row of an Arrow table with JSON values, or the error of a row that has none."""
    try:
        return {name: _to_json_value(value, name in ("image", "images")) for name, value in columns.items()}
    except DataError as error:
        return error


def _to_json_value(value: Any, is_image: bool = False) -> Any:
    """Convert a parquet value to JSON types: images to data: URIs, dates to text, decimals to numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"bytes", "path"}:  # how the datasets library stores an image
            return value["path"] if value["bytes"] is None else _to_json_value(value["bytes"], True)
        return {name: _to_json_value(item, name == "image") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item, is_image) for item in value]
    if isinstance(value, bytes):
        if not is_image:
            raise DataError(f"it holds bytes that are not an image, {value!r:.40}; store text")
        return Image.of(value).url
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


_READERS: dict[str, Reader] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
SUFFIXES = (*_READERS, *_OPENERS)
