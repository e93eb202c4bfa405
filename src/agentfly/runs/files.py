"""Crash-safe files: lines are appended completely or not at all, other files are replaced atomically; a lock."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import psutil  # type: ignore[import-untyped]
from pydantic_core import PydanticSerializationError, to_json

from agentfly.errors import ConfigError, DataError

PARTIAL_FILES = ".*.part"
"""Glob of temporary files that a killed process leaves behind."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError if it is none: opening a named pipe would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a JSONL file; empty if there is no file.

    A last line without a line break is incomplete (its process was killed or is writing it) and is skipped.
    """
    try:
        with open_regular(path) as file:
            complete, _, _partial = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    values = []
    for number, line in enumerate(complete.splitlines(), 1):
        if not line:
            continue
        location = f"line {number} of {path}"
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{location} is not JSON ({error}); restore the file or cut the line") from error
        if not isinstance(value, dict):
            raise DataError(f"{location} is a {type(value).__name__}; every line must be an object")
        values.append(value)
    return values


def _open_at_once(path: str, flags: int) -> int:
    """Opener that does not wait for the reader of a named pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def append_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Append lines to a file. If they cannot be written completely, the file stays unchanged."""
    data = b"".join(encode_line(replace_non_finite(value)) for value in values)
    with explain_write_error(path), open(path, "ab", buffering=0, opener=_open_at_once) as file:
        before = file.tell()
        try:
            if file.write(data) != len(data):
                raise OSError(None, "only a part could be written; is the disk full?")
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(before)
            raise


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, also after a crash."""
    with open_atomic(path) as file:
        file.write(data)


@contextlib.contextmanager
def open_atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file whose content replaces `path` atomically when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explain_write_error(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def encode_line(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON object as one line. Raises ValueError for NaN and infinity.

    Half a surrogate pair, which UTF-8 cannot encode, is written as an escape.
    """
    try:  # nine times as fast as json, and trajectories are encoded while the learner launches kernels
        data = to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        pass
    else:
        if not (b"NaN" in data or b"Infinity" in data):
            return data + b"\n"
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"


@contextlib.contextmanager
def explain_write_error(path: Path) -> Iterator[None]:
    """Turn an OSError into a DataError that names the file and the reason."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} could not be written ({error.strerror or error}); existing content is unharmed: "
            "free disk space or use another folder, then resume the run"
        ) from error


def replace_non_finite(value: Any) -> Any:
    """Copy a value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(name): replace_non_finite(element) for name, element in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_LOCKS: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close inherited locks in a forked child: a child that outlives the writer would keep the run locked."""
    for lock in list(_LOCKS):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def lock_file(file: IO[Any], *, wait: bool = False) -> None:
    """Lock an open file until it is closed. Raises BlockingIOError if it is locked and not `wait`."""
    try:
        import fcntl
    except ImportError as error:
        raise ConfigError(
            f"{file.name} cannot be locked: {sys.platform} has no fcntl. Runs, evaluation logs, prepared models "
            "and the viewer need Linux or macOS; on Windows, use WSL"
        ) from error
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock_file(file: IO[Any]) -> None:
    """Release the lock and close the file."""
    import fcntl

    fcntl.flock(file, fcntl.LOCK_UN)  # closing alone leaves it locked while a child forked at this moment has a copy
    file.close()


def acquire_lock(path: Path) -> IO[str]:
    """Lock a run directory for writing. Raises ConfigError, naming the processes, if others hold the lock.

    The kernel releases the lock when its processes end, however they end.
    """
    with explain_write_error(path):
        lock = (path / ".lock").open("a+")
    try:
        lock_file(lock)
    except OSError as error:
        lock.seek(0)
        writer = lock.read().strip() or "unknown"
        lock.close()
        holders = _find_holders(path / ".lock") or [f"process {writer}, perhaps on another machine"]
        raise ConfigError(
            f"the run in {path} is being written by {' and '.join(holders)}; wait for it to end, or end it with `kill`"
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    _LOCKS.add(lock)
    return lock


def _find_holders(lock: Path) -> list[str]:
    """The processes of this machine that have a lock file open: id, age and command."""
    holders = []
    for process in psutil.process_iter():
        # Processes of other users do not show their files, and others end meanwhile.
        with contextlib.suppress(psutil.Error):
            if any(file.path == str(lock.resolve()) for file in process.open_files()):
                minutes = (time.time() - process.create_time()) / 60
                command = " ".join(process.cmdline())
                holders.append(f"process {process.pid} (`{command[:120]}`, for {minutes:.0f} min)")
    return holders
