"""Read a dataset file into tasks; write trajectories to a file and read them.

One row is one task: `question` or `messages` is the prompt, every other column is kept by name. Row numbers and default
ids start at 0, line numbers at 1. The whole file is validated first: if any row is bad, DataError names the place and
reason of the first few bad rows and their total number.

    .json              a list of rows
    .jsonl  .ndjson    one row per line; blank lines are skipped
    .csv               a header, then one row per record; every cell is text, `messages` is JSON
    .parquet           requires pyarrow
    all formats but parquet may be compressed: .jsonl.gz, .json.xz, …
"""

from __future__ import annotations

import csv
import datetime
import difflib
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from agentfly.errors import ConfigError, DataError, describe
from agentfly.extras import install_command
from agentfly.trajectory import Trajectory
from agentfly.types import Image, Task

Row = tuple[str, Any]
"""The place of a row in its file, and its value: a mapping, or the DataError of a row that cannot be parsed."""
Reader = Callable[[Path], Iterator[Row]]

_MAX_REPORTED = 3
_BOM = b"\xef\xbb\xbf"
_QUESTION_LIKE = ("prompt", "instruction", "problem", "query", "input")
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def read_tasks(path: str | Path, *, question: str = "question") -> list[Task]:
    """Read every row of a file as a task.

    `question` names the column that becomes the prompt. If it is not the default, every row must have that column, and
    it takes precedence over `messages`. The id of a task is the row's `id`, or the row number if it has none.
    """
    path = Path(path)
    tasks: list[Task] = []
    bad: list[str] = []
    try:
        for number, (place, row) in enumerate(_find_reader(path)(path)):
            try:
                tasks.append(_parse_row(row, str(number), question, path.parent))
            except (DataError, OSError, ValueError) as error:  # OSError, ValueError: an image path that cannot be one
                bad.append(f"{place}: {error}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(bad) == 1:
        raise DataError(f"{path}, {bad[0]}")
    if bad:
        lines = [f"{path}: {len(bad)} of {len(bad) + len(tasks)} rows cannot be read", *bad[:_MAX_REPORTED]]
        if more := len(bad[_MAX_REPORTED:]):
            lines.append(f"and {more} more row{'s' if more > 1 else ''}")
        raise DataError("\n  ".join(lines))
    if not tasks:
        raise DataError(f"{path} has no rows")
    return tasks


def select(tasks: Sequence[Task], spec: str) -> list[Task]:
    """Select tasks by an id, an index such as "3", or a range such as "0:10".

    An id takes precedence over an index. A range always counts rows: "3:4" is row 3, whatever the ids are.
    """
    spec = spec.strip()
    if named := [task for task in tasks if task.id == spec]:
        return named
    if numbers := re.fullmatch(r"(-?\d*):(-?\d*)", spec):
        start, stop = (int(number) if number else None for number in numbers.groups())
        if selected := list(tasks[start:stop]):
            return selected
        raise ConfigError(f"the range {spec!r} selects none of the {len(tasks)} tasks")
    if re.fullmatch(r"-?\d+", spec):
        if -len(tasks) <= int(spec) < len(tasks):
            return [tasks[int(spec)]]
        raise ConfigError(f"no task {spec}: there are {len(tasks)}, counted from 0, and none has that id")
    close = difflib.get_close_matches(spec, [task.id for task in tasks], 3)
    hint = f"; close ones are {', '.join(map(repr, close))}" if close else ""
    raise ConfigError(f"no task has the id {spec!r}{hint}; an index (3) or a range (0:10) also works")


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write trajectories to a file, one JSON object per line; `load_trajectories` reads them.

    Raises DataError if the file cannot be written.
    """
    path = Path(path)
    try:
        # A lone surrogate has no UTF-8 encoding; it is written as a JSON escape.
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(each.to_json(), ensure_ascii=False) + "\n" for each in trajectories)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


def load_trajectories(path: str | Path) -> list[Trajectory]:
    """Read the trajectories of a file that `save_trajectories` or `agentfly run --save` wrote.

    Raises DataError, with the line, if the file cannot be read.
    """
    path = Path(path)
    trajectories = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    trajectories.append(Trajectory.from_json(json.loads(line)))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DataError(f"{path}, line {number}: not a trajectory: {describe(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return trajectories


def _parse_row(row: Any, number: str, question: str, folder: Path) -> Task:
    """Convert a row to a task. `number` is the default id; images are looked up in `folder`."""
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be an object of columns, not {_describe_value(row)}")
    present = ", ".join(map(repr, row)) or "nothing"
    prompt = dict(row)
    if question != "question":
        if question not in row:
            raise DataError(f"no column {question!r} to take the question from; the row has {present}")
        value = row[question]
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{question!r} is to be the question and must be text, not {_describe_value(value)}")
        prompt["question"] = value
        prompt.pop("messages", None)
    elif row.get("messages") is None and not isinstance(row.get("question"), str):
        if "question" in row:
            raise DataError(f"'question' must be text, not {_describe_value(row['question'])}")
        other = next((name for name in _QUESTION_LIKE if isinstance(row.get(name), str)), None)
        hint = f"; question={other!r} takes that column" if other else ""
        raise DataError(f"a row needs a 'question' or 'messages'; it has {present}{hint}")
    try:
        messages = Task.of(_resolve_image_paths(prompt, folder)).messages
    except (AttributeError, TypeError) as error:
        raise DataError(f"something in it has the wrong shape: {error}") from error
    columns = {"question": prompt["question"]} if "question" in prompt else {}
    columns |= {str(name): value for name, value in row.items() if name != "messages"}
    given = row.get("id")
    return Task(messages, columns, number if given is None or given == "" else str(given))


def _describe_value(value: object) -> str:
    if value is None or value == "":
        return "nothing"
    return f"{value!r:.60}" if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


def _resolve_image_paths(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace paths of images relative to the dataset file, in `image`, `images` and the parts of `messages`."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(each) for each in value]
        if isinstance(value, str) and len(value) < 1024 and not value.startswith(("data:", "http:", "https:")):
            return str(folder / value) if (folder / value).is_file() else value
        return value

    out = {name: resolve(value) if name in ("image", "images") else value for name, value in row.items()}
    if isinstance(row.get("messages"), list):
        out["messages"] = []
        for message in row["messages"]:
            if isinstance(message, Mapping) and isinstance(message.get("content"), list):
                parts = [
                    {**part, "image": resolve(part["image"])}
                    if isinstance(part, Mapping) and part.get("type") == "image" and "image" in part
                    else part
                    for part in message["content"]
                ]
                message = {**message, "content": parts}
            out["messages"].append(message)
    return out


# ── one reader per format ──


def _find_reader(path: Path) -> Reader:
    """Choose the reader by the suffix. A missing file is a DataError that lists files with similar names."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in _OPENERS
    if compressed:
        suffixes.pop()
    suffix = suffixes[-1] if suffixes else ""
    if path.is_dir() or not path.exists():
        folder = path if path.is_dir() else path.parent
        near: list[str] = []
        if folder.is_dir():
            names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
            data_files = [name for name in names if any(s.lower() in _READERS for s in Path(name).suffixes)]
            near = difflib.get_close_matches(path.name, names, 5) or data_files[:5]
        hint = f"; near it are {', '.join(near)}" if near else ""
        if path.is_dir():
            raise DataError(f"{path} is a folder; name one file in it{hint}")
        missing = "" if folder.is_dir() else f": there is no folder {folder}"
        raise DataError(f"no file {path}{missing}{hint}")
    if suffix not in _READERS or (compressed and suffix == ".parquet"):
        raise DataError(f"{path} has no known suffix; known are {', '.join(_READERS)}, also with .gz or .xz")
    return _READERS[suffix]


def _open(path: Path) -> BinaryIO:
    opener = _OPENERS.get(path.suffix.lower())
    return cast(BinaryIO, opener(path, "rb") if opener else path.open("rb"))


def _loads(text: str | bytes) -> Any:
    """Parse JSON; ValueError for NaN and Infinity, which Python's parser accepts."""

    def reject(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON; write null")

    return json.loads(text, parse_constant=reject)


def _read_json(path: Path) -> Iterator[Row]:
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
        raise DataError(f"{path} must hold a list of rows, not {_describe_value(rows)}")
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _read_jsonl(path: Path) -> Iterator[Row]:
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


def _read_csv(path: Path) -> Iterator[Row]:
    """Every cell is text or, if empty, None, so that an answer "2" equals the prediction "2"; `messages` is JSON."""
    csv.field_size_limit(sys.maxsize)  # 128 KiB by default, which a long prompt or a data: URI exceeds
    header: list[str] = []
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
        records = csv.reader(file, strict=True)
        try:
            for record in records:
                place = f"line {records.line_num}"
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
                    yield place, DataError(f"{len(record)} cells under a header of {len(header)}")
                    continue
                row: dict[str, Any] = {name: cell or None for name, cell in zip(header, record, strict=True)}
                try:
                    if row.get("messages") is not None:
                        row["messages"] = _loads(row["messages"])
                except ValueError as error:
                    yield place, DataError(f"'messages' is not JSON: {error}")
                else:
                    yield place, row
        except csv.Error as error:
            yield f"line {records.line_num}", DataError(f"it is not CSV: {error}")


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow to be read: {install_command('parquet')}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, columns in enumerate(rows):
                row: Any
                try:
                    row = {name: _to_json_value(value, name in ("image", "images")) for name, value in columns.items()}
                except DataError as error:
                    row = error
                yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error


def _to_json_value(value: Any, is_image: bool = False) -> Any:
    """Convert a parquet value to JSON types: images to data: URIs, dates to text, decimals to numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"bytes", "path"}:  # how the datasets library stores an image
            return value["path"] if value["bytes"] is None else _to_json_value(value["bytes"], True)
        return {name: _to_json_value(each, name == "image") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(each, is_image) for each in value]
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
