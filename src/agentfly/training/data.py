"""Read a dataset file into tasks, all of it before anything starts.

One row is one task: `question` or `messages` is the prompt, every other column is kept by name. Rows count from
0, as indices and default ids do; lines count from 1, as editors do. A file with a bad row gives no tasks at all:
the error names the place and the reason of the first few, and how many there are.

    .json              a list of rows
    .jsonl  .ndjson    a row a line; blank lines are skipped
    .csv               a header, then a row a record; see `_typed` for what its cells become
    .parquet           needs pyarrow
    any but parquet may be packed: .jsonl.gz, .json.xz, …
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

from agentfly.errors import ConfigError, DataError
from agentfly.types import Image, Task

Row = tuple[str, Any]
"""Where a row stands, and what stands there: a mapping, or the DataError that reading it gave."""
Reader = Callable[[Path, str], Iterator[Row]]
"""Reads a file, told which column is the question."""

_SHOWN = 3
_BOM = b"\xef\xbb\xbf"
_OTHER_NAMES = ("prompt", "instruction", "problem", "query", "input")


def read_tasks(path: str | Path, *, question: str = "question") -> list[Task]:
    """Read every row of a file as a task.

    `question` names the column that becomes the prompt. A name other than the default must be in every row, and
    goes before `messages`. A task's id is its row's `id`, or its row number where it has none.
    """
    path = Path(path)
    tasks: list[Task] = []
    bad: list[tuple[str, Exception]] = []
    try:
        for number, (place, row) in enumerate(_reader(path)(path, question)):
            try:
                tasks.append(_task(row, str(number), question, path.parent))
            except (DataError, OSError, ValueError) as error:  # OSError, ValueError: a path that cannot be one
                bad.append((place, error))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; save it as UTF-8") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if bad:
        raise _complaint(path, bad, len(bad) + len(tasks))
    if not tasks:
        raise DataError(f"{path} has no rows")
    return tasks


def select(tasks: Sequence[Task], spec: str) -> list[Task]:
    """Pick tasks as the command line names them: an id, an index such as "3", or a range such as "0:10".

    An id is a name that somebody gave, so it goes before an index; a range always counts rows, so "3:4" is row 3
    whatever the ids are.
    """
    spec = spec.strip()
    if named := [task for task in tasks if task.id == spec]:
        return named
    if numbers := re.fullmatch(r"(-?\d*):(-?\d*)", spec):
        start, stop = (int(number) if number else None for number in numbers.groups())
        if chosen := list(tasks[start:stop]):
            return chosen
        raise ConfigError(f"the range {spec!r} holds none of the {len(tasks)} tasks")
    if re.fullmatch(r"-?\d+", spec):
        if -len(tasks) <= int(spec) < len(tasks):
            return [tasks[int(spec)]]
        raise ConfigError(f"no task {spec}: there are {len(tasks)}, counted from 0, and none has that id")
    close = difflib.get_close_matches(spec, [task.id for task in tasks], 3)
    hint = f"; close ones are {', '.join(map(repr, close))}" if close else ""
    raise ConfigError(f"no task has the id {spec!r}{hint}; an index (3) or a range (0:10) will do too")


def _task(row: Any, number: str, question: str, folder: Path) -> Task:
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"a row must be an object of columns, not {_kind(row)}")
    prompt = dict(row)
    if question != "question":
        prompt["question"] = _named(row, question)
        prompt.pop("messages", None)
    elif row.get("messages") is None and not isinstance(row.get("question"), str):
        _no_question(row)
    try:
        task = Task.of(_located(prompt, folder))
    except (AttributeError, TypeError) as error:
        raise DataError(f"something in it has the wrong shape: {error}") from error
    columns = {"question": prompt["question"]} if "question" in prompt else {}
    columns |= {str(name): value for name, value in row.items() if name != "messages"}
    given = row.get("id")
    return Task(task.messages, columns, number if given is None or given == "" else str(given))


def _named(row: Mapping[str, Any], question: str) -> str:
    if question not in row:
        has = ", ".join(map(repr, row)) or "nothing"
        raise DataError(f"no column {question!r} to take the question from; the row has {has}")
    value = row[question]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{question!r} is to be the question and must be text, not {_kind(value)}")
    return value


def _no_question(row: Mapping[str, Any]) -> NoReturn:
    if "question" in row:
        raise DataError(f"'question' must be text, not {_kind(row['question'])}")
    has = ", ".join(map(repr, row)) or "nothing"
    other = next((name for name in _OTHER_NAMES if isinstance(row.get(name), str)), None)
    hint = f"; question={other!r} takes that column" if other else ""
    raise DataError(f"a row needs a 'question' or 'messages'; it has {has}{hint}")


def _kind(value: object) -> str:
    if value is None or value == "":
        return "nothing"
    return f"{value!r:.60}" if isinstance(value, bool | int | float | str) else f"a {type(value).__name__}"


def _located(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row, with the pictures that lie beside the file named by paths that lead there."""

    def locate(value: Any) -> Any:
        if isinstance(value, list):
            return [locate(each) for each in value]
        if isinstance(value, str) and len(value) < 1024 and not value.startswith(("data:", "http:", "https:")):
            return str(folder / value) if (folder / value).is_file() else value
        return value

    def part(value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("type") == "image" and "image" in value:
            return {**value, "image": locate(value["image"])}
        return value

    def message(value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("content"), list):
            return {**value, "content": [part(each) for each in value["content"]]}
        return value

    out = {name: locate(value) if name in ("image", "images") else value for name, value in row.items()}
    if isinstance(row.get("messages"), list):
        out["messages"] = [message(each) for each in row["messages"]]
    return out


def _complaint(path: Path, bad: Sequence[tuple[str, Exception]], rows: int) -> DataError:
    if len(bad) == 1:
        place, error = bad[0]
        return DataError(f"{path}, {place}: {error}")
    lines = [f"  {place}: {error}" for place, error in bad[:_SHOWN]]
    if more := len(bad[_SHOWN:]):
        lines.append(f"  and {more} more row{'s' if more > 1 else ''}")
    return DataError("\n".join([f"{path}: {len(bad)} of {rows} rows cannot be read", *lines]))


# One reader a format.


def _reader(path: Path) -> Reader:
    """The function that reads a file of this name, once the file is there."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    packed = bool(suffixes) and suffixes[-1] in _UNPACK
    kind = (suffixes[-2] if len(suffixes) > 1 else "") if packed else (suffixes[-1] if suffixes else "")
    if path.is_dir():
        raise DataError(f"{path} is a folder; name one file in it{_nearby(path / path.name)}")
    if not path.exists():
        where = "" if path.parent.is_dir() else f": there is no folder {path.parent}"
        raise DataError(f"no file {path}{where}{_nearby(path)}")
    if kind not in _READERS or (packed and kind == ".parquet"):
        raise DataError(f"{path} has a name that tells no format; known are {', '.join(_READERS)}, also .gz or .xz")
    return _READERS[kind]


def _nearby(path: Path) -> str:
    """Data files in the folder, those of a close name first."""
    if not path.parent.is_dir():
        return ""
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    near = difflib.get_close_matches(path.name, names, 5) or [
        name for name in names if any(suffix.lower() in _READERS for suffix in Path(name).suffixes)
    ]
    return f"; near it are {', '.join(near[:5])}" if near else ""


_UNPACK: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def _open(path: Path) -> BinaryIO:
    opener = _UNPACK.get(path.suffix.lower())
    return cast(BinaryIO, opener(path, "rb") if opener else path.open("rb"))


def _loads(text: str | bytes) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON; write null")

    return json.loads(text, parse_constant=refuse)


def _json(path: Path, question: str) -> Iterator[Row]:
    with _open(path) as file:
        text = file.read().removeprefix(_BOM).decode()
    if not text.strip():
        return
    try:
        rows = _loads(text)
    except ValueError as error:
        lines = "; a row a line is JSON lines: name it .jsonl" if "Extra data" in str(error) else ""
        raise DataError(f"{path} is not JSON: {error}{lines}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} must hold a list of rows, not {_kind(rows)}")
    yield from ((f"row {number}", row) for number, row in enumerate(rows))


def _json_lines(path: Path, question: str) -> Iterator[Row]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield f"line {number}", _json_line(line)


def _json_line(line: bytes) -> Any:
    try:
        return _loads(line.decode())
    except UnicodeDecodeError as error:
        return DataError(f"it is not UTF-8 text: {error}")
    except ValueError as error:
        return DataError(f"it is not JSON: {error}")


def _csv(path: Path, question: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # 128 KiB by default, which a long prompt or a data: URI exceeds
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as file:
        records = csv.reader(file, strict=True)
        header = _header(path, records)
        rows = list(_csv_rows(records, header))
    _typed([row for _, row in rows if isinstance(row, dict)], set(header) - {question, "id", "messages"})
    yield from rows


def _csv_rows(records: Any, header: list[str]) -> Iterator[Row]:
    """Text for every cell, None for an empty one."""
    try:
        for record in records:
            place = f"line {records.line_num}"
            if not record:
                continue
            if len(record) != len(header):
                yield place, DataError(f"{len(record)} cells under a header of {len(header)}")
                continue
            row: dict[str, Any] = {name: cell or None for name, cell in zip(header, record, strict=True)}
            yield place, _with_messages(row)
    except csv.Error as error:
        yield f"line {records.line_num}", DataError(f"it is not CSV: {error}")


def _header(path: Path, records: Any) -> list[str]:
    try:
        header: list[str] = next((record for record in records if record), [])
    except csv.Error as error:
        raise DataError(f"{path}, line {records.line_num}: it is not CSV: {error}") from error
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise DataError(f"{path}, line 1: the header names {', '.join(map(repr, twice))} more than once")
    return header


def _with_messages(row: dict[str, Any]) -> dict[str, Any] | DataError:
    """A conversation in a cell is JSON."""
    if row.get("messages") is None:
        return row
    try:
        return {**row, "messages": _loads(row["messages"])}
    except ValueError as error:
        return DataError(f"'messages' is not JSON: {error}")


def _typed(rows: list[dict[str, Any]], columns: Iterable[str]) -> None:
    """Make numbers of a column whose every filled cell is one, and truth values of one of `true` and `false`.

    A whole column or none of it, so that a reward meets one type; and only where nothing is lost: "007", "1.50"
    and "1e3" do not come back as they were written, so they stay text, and their column with them.
    """
    for column in columns:
        cells = [row[column] for row in rows if row[column] is not None]
        values = [_scalar(cell) for cell in cells]
        kinds = {type(value) for value in values}
        if kinds and (kinds <= {int, float} or kinds == {bool}):
            for row in rows:
                row[column] = None if row[column] is None else _scalar(row[column])


def _scalar(cell: str) -> Any:
    try:
        value = _loads(cell)
    except ValueError:
        return cell
    return value if isinstance(value, bool | int | float) and json.dumps(value) == cell else cell


def _parquet(path: Path, question: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow to be read: pip install agentfly[parquet]") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(rows):
                yield f"row {number}", _plain_row(row)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a parquet file that can be read: {error}") from error


def _plain_row(row: dict[str, Any]) -> dict[str, Any] | DataError:
    try:
        return {name: _plain(value, name in ("image", "images")) for name, value in row.items()}
    except DataError as error:
        return error


def _plain(value: Any, picture: bool = False) -> Any:
    """A value that JSON can keep: pictures become data: URIs, dates text, decimals numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"bytes", "path"}:  # how the datasets library stores a picture
            return value["path"] if value["bytes"] is None else _plain(value["bytes"], True)
        return {name: _plain(each, name == "image") for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, picture) for each in value]
    if isinstance(value, bytes):
        if not picture:
            raise DataError(f"it holds bytes that are no picture, {value!r:.40}; store text")
        return Image.of(value).url
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value


_READERS: dict[str, Reader] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}
