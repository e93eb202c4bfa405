"""File access for the host, done by the session init with the session's own permissions and mounts."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from . import frames

_CHUNK = 1 << 18
_MAX_WALK = 100_000
_MAX_ANSWER = 6 << 20  # bytes of one answer with entries
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def handle(host: frames.Channel, question: dict[str, Any], work: str) -> None:
    """Execute a `put`, `get` or `list` request and send the answer. Errors of the file system are answers too."""
    data = bytearray()
    if question["do"] == "put":
        while len(data) < question["size"]:
            data += frames.receive(host, 1 << 20)[1]
    answer: dict[str, Any] = {}
    content = b""
    try:
        path = os.path.realpath(os.path.join(work, question["path"]))
        if path != work and not path.startswith(work.rstrip("/") + "/"):
            raise ValueError(f"{question['path']} is outside the session's folder {work}")
        if question["do"] == "put":
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _write(path, data)
        elif question["do"] == "get":
            content = _read(path, question["most"])
            answer = {"size": len(content)}
        else:
            answer = _list(path, work, question["deep"], limit=question["most"])
    except (OSError, ValueError) as error:
        answer = {"error": getattr(error, "strerror", None) or str(error)}
        content = b""
    host.sendall(frames.pack(frames.ANSWER, json.dumps({"id": question["id"], **answer}).encode()))
    for start in range(0, len(content), _CHUNK):
        host.sendall(frames.pack(frames.DATA, content[start : start + _CHUNK]))


def _write(path: str, data: bytearray) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    try:
        _require_regular_file(fd)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def _read(path: str, max_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        _require_regular_file(fd)
        size = os.fstat(fd).st_size
        if size > max_bytes:
            raise ValueError(f"{size} bytes, more than {max_bytes}")
        data = bytearray()
        while len(data) < max_bytes:
            chunk = os.read(fd, min(max_bytes - len(data), _CHUNK))
            if not chunk:
                break
            data += chunk
        return bytes(data)
    finally:
        os.close(fd)


def _require_regular_file(fd: int) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "Is a directory")
    if not stat.S_ISREG(mode):
        raise ValueError("not a regular file")


def _list(path: str, work: str, recursive: bool, limit: int) -> dict[str, Any]:
    """List a folder: at most `limit` entries, and as many as one answer can hold."""
    all_entries: list[tuple[str, str, int]] = []
    folders = [path]
    while folders and len(all_entries) < _MAX_WALK:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                info = entry.stat(follow_symlinks=False)
                kind = _KINDS.get(stat.S_IFMT(info.st_mode), "other")
                all_entries.append((os.path.relpath(entry.path, work), kind, info.st_size))
                if recursive and kind == "folder":
                    folders.append(entry.path)
    all_entries.sort()
    listed = []
    left = _MAX_ANSWER
    for listed_entry in all_entries[:limit]:
        left -= 6 * len(listed_entry[0]) + 64  # JSON escapes a character in at most six bytes
        if left < 0:
            break
        listed.append(listed_entry)
    return {"entries": listed, "more": len(all_entries) > len(listed)}
