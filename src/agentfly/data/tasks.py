"""Read a dataset into tasks.

One row is one task: `question` or `messages` is the prompt, every other column is kept by name. Rows of other formats
are converted first. Row numbers and default ids start at 0, line numbers at 1. The whole source is validated: if any
row is bad, DataError names the place and reason of the first few bad rows and their total number.
"""

from __future__ import annotations

import difflib
import logging
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from agentfly.data import huggingface
from agentfly.data.files import LocatedRow, describe_value, find_reader
from agentfly.data.formats import RowConverter, list_columns, list_fitting
from agentfly.errors import ConfigError, DataError
from agentfly.types import Task
from agentfly.validation import PositiveInt, validate

_LOG = logging.getLogger(__name__)
MAX_ITERATED_TASKS = 100_000
"""Maximum number of tasks taken from an iterator, whose length is not known."""
_MAX_REPORTED = 3
_QUESTION_LIKE = ("instruction", "problem", "query", "input")


def read_tasks(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    question: str = "question",
    format: str | None = None,
    rename: Mapping[str, str] | None = None,
    split: str | None = None,
    limit: int | None = None,
) -> list[Task]:
    """Read every row of a source as a task.

    `source`: a file, a folder of task folders, a Hugging Face dataset (a `save_to_disk` folder, a name of the hub such
    as `org/name`, or an object), or rows. `question` names the column that becomes the prompt. If it is not the
    default, every row must have that column, and it takes precedence over `messages`. The id of a task is the row's
    `id`, or the row number if it has none.

    `format`: the row format (`agentfly`, `verl`, `trl`, `sharegpt`); None detects it by the first row. `rename`: new
    names of columns, by old names; it comes first. `split`: of a Hugging Face dataset. `limit`: read only this many
    rows; a dataset of the hub is then streamed instead of downloaded.

    Columns without effect are reported in the log.
    """
    if question != "question" and format not in (None, "agentfly"):
        raise ConfigError(f"question={question!r} and format={format!r} both select the prompt; give one")
    validate("limit", limit, PositiveInt | None, " or None")
    folder = Path(source).parent if isinstance(source, str | Path) else Path()
    name = str(source) if isinstance(source, str | Path) else f"a {type(source).__name__}"
    converter = RowConverter(name, "agentfly" if question != "question" else format, rename or {})
    tasks: list[Task] = []
    bad: list[str] = []
    try:
        for number, (position, row) in enumerate(islice(_open_rows(source, split, limit), limit)):
            try:
                if isinstance(row, DataError):
                    raise row
                if not isinstance(row, Mapping):
                    raise DataError(f"a row must be an object of columns, not {describe_value(row)}")
                converted = converter.convert(row)
                if question != "question" and converted.pop("messages", None) is not None:
                    converter.ignored.add("messages")
                tasks.append(_parse_row(converted, str(number), question, folder))
            except (DataError, OSError, ValueError) as error:  # OSError, ValueError: an image path that cannot be one
                bad.append(f"{position}: {error}")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text: {error}; save it as UTF-8") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{name} cannot be read: {error}") from error
    if len(bad) == 1:
        raise DataError(f"{name}, {bad[0]}")
    if bad:
        lines = [f"{name}: {len(bad)} of {len(bad) + len(tasks)} rows cannot be read", *bad[:_MAX_REPORTED]]
        if more := len(bad[_MAX_REPORTED:]):
            lines.append(f"and {more} more row{'s' if more > 1 else ''}")
        raise DataError("\n  ".join(lines))
    if not tasks:
        raise DataError(f"{name} has no rows")
    if converter.ignored:
        _LOG.warning("%s: columns without effect: %s", name, ", ".join(sorted(converter.ignored)))
    return tasks


def _open_rows(source: str | Path | Iterable[Any], split: str | None, limit: int | None) -> Iterator[LocatedRow]:
    """The rows of a source with their places, read as they are iterated."""
    if isinstance(source, str | Path) and huggingface.is_dataset(source):
        return huggingface.read_dataset(source, split, stream=limit is not None)
    if split is not None:
        raise ConfigError(f"split={split!r} selects a split of a Hugging Face dataset by name; leave it out here")
    if isinstance(source, str | Path):
        return find_reader(Path(source))(Path(source))
    if hasattr(source, "with_format"):  # of the library `datasets`
        rows = huggingface.iterate_dataset(source)
    else:
        rows = ((f"row {number}", row) for number, row in enumerate(source))
    return rows if limit is not None or isinstance(source, Sized) else _refuse_endless(rows, type(source).__name__)


def _refuse_endless(rows: Iterable[LocatedRow], kind: str) -> Iterator[LocatedRow]:
    for number, row in enumerate(rows):
        if number == MAX_ITERATED_TASKS:  # an endless generator would fill the memory
            raise ConfigError(
                f"the rows are a {kind} that goes on after {MAX_ITERATED_TASKS:,} of them; "
                "limit= is the number of rows to read"
            )
        yield row


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


def _parse_row(row: Mapping[str, Any], number: str, question: str, folder: Path) -> Task:
    """Convert a row to a task. `number` is the default id; images are looked up in `folder`."""
    prompt = dict(row)
    if question != "question":
        if question not in row:
            raise DataError(f"no column {question!r} to take the question from; {list_columns(row)}")
        value = row[question]
        if not isinstance(value, str) or not value.strip():
            fitting = list_fitting(row)
            hint = f"; without question=, it is read as {' or '.join(fitting)}" if fitting else ""
            raise DataError(f"{question!r} is to be the question and must be text, not {describe_value(value)}{hint}")
        prompt["question"] = value
    elif row.get("messages") is None and not isinstance(row.get("question"), str):
        if "question" in row:
            raise DataError(f"'question' must be text, not {describe_value(row['question'])}")
        other = next((name for name in _QUESTION_LIKE if isinstance(row.get(name), str)), None)
        others = "in other formats 'prompt' (verl, trl) or 'conversations' (sharegpt)"
        hint = f"question={other!r} takes that column" if other else others
        raise DataError(f"a row needs a 'question' or 'messages'; {list_columns(row)}; {hint}")
    try:
        messages = Task.of(_resolve_image_paths(prompt, folder)).messages
    except (AttributeError, TypeError) as error:
        raise DataError(f"something in it has the wrong shape: {error}") from error
    columns = {"question": prompt["question"]} if "question" in prompt else {}
    columns |= {str(name): value for name, value in row.items() if name != "messages"}
    row_id = row.get("id")
    return Task(messages, columns, number if row_id is None or row_id == "" else str(row_id))


def _resolve_image_paths(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace paths of images relative to the dataset file, in `image`, `images` and the parts of `messages`."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(path) for path in value]
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
