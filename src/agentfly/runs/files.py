"""Files that a kill or a full disk cannot spoil: lines are added whole or not at all, other files change at once."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentfly.errors import DataError

PARTS = ".*.part"
"""What a kill leaves of files that were being replaced."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines; none where there is no file.

    A last line that has no end was being written when its process was killed, or is being written: it is left out.
    """
    try:
        whole, _, _torn = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    return [_object(line, f"line {number} of {path}") for number, line in enumerate(whole.splitlines(), 1) if line]


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Add lines at the end of a file. Where they cannot be written whole, the file stays as it was."""
    data = b"".join(to_line(finite(value)) for value in values)
    with unwritable(path), path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError(None, "only a part could be written; is the disk full?")
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def replace(path: Path, data: bytes) -> None:
    """Write a file so that whoever looks, even after a crash, finds all of what was there before or all of this."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with unwritable(path):
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def to_line(value: Mapping[str, Any]) -> bytes:
    """A JSON object in one line.

    Half a surrogate pair, which UTF-8 has no bytes for, is written as the escape that JSON has for it.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """Say which file could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror or error}); what was there is unharmed: "
            "make room or give another folder, then resume the run"
        ) from error


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON ({error}); restore the file or cut the line") from error
    if not isinstance(value, dict):
        raise DataError(f"{place} is a {type(value).__name__}; every line must be an object")
    return value


def finite(value: Any) -> Any:
    """The same with null for every number that is none: JSON has no word for NaN and infinity."""
    if isinstance(value, Mapping):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
