"""The session's files, read and written by its keeper: with the session's own rights and in its own view."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from . import frames

_CHUNK = 1 << 18
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}


def answer(host: frames.Channel, question: dict[str, Any], work: str) -> None:
    """Do what the host asks and answer; what the file system refuses is an answer too."""
    data: list[bytes] = []
    if question["do"] == "put":
        while sum(map(len, data)) < question["size"]:
            data.append(frames.receive(host, 1 << 20)[1])
    try:
        path = _inside(question["path"], work)
        said, content = _do(question, path, b"".join(data), work)
    except (OSError, ValueError) as error:
        said, content = {"error": getattr(error, "strerror", None) or str(error)}, b""
    host.sendall(frames.pack(frames.ANSWER, json.dumps({"id": question["id"], **said}).encode()))
    for start in range(0, len(content), _CHUNK):
        host.sendall(frames.pack(frames.DATA, content[start : start + _CHUNK]))


def _inside(path: str, work: str) -> str:
    found = os.path.realpath(os.path.join(work, path))
    if found != work and not found.startswith(work.rstrip("/") + "/"):
        raise ValueError(f"{path} is outside the session's folder {work}")
    return found


def _do(question: dict[str, Any], path: str, data: bytes, work: str) -> tuple[dict[str, Any], bytes]:
    if question["do"] == "put":
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write(path, data)
        return {}, b""
    if question["do"] == "get":
        content = _read(path, question["most"])
        return {"size": len(content)}, content
    entries = _walk(path, work, question["deep"])
    shown = _fitting(entries[: question["most"]])
    return {"entries": shown, "more": len(entries) > len(shown)}, b""


def _fitting(entries: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """The first entries, as many as one answer may carry when every character of a name is escaped."""
    left, most = 6 << 20, 0
    for name, _, _ in entries:
        left -= 6 * len(name) + 64
        if left < 0:
            break
        most += 1
    return entries[:most]


def _write(path: str, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
    try:
        _must_be_file(file)
        while data:
            data = data[os.write(file, data) :]
    finally:
        os.close(file)


def _read(path: str, most: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        _must_be_file(file)
        size = os.fstat(file).st_size
        if size > most:
            raise ValueError(f"{size} bytes, more than {most}")
        parts, left = [], most
        while left > 0:
            part = os.read(file, min(left, _CHUNK))
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(file)


def _must_be_file(file: int) -> None:
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "Is a directory")
    if not stat.S_ISREG(mode):
        raise ValueError("not a regular file")


def _walk(path: str, work: str, deep: bool) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    folders = [path]
    while folders and len(found) < 100_000:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                seen = entry.stat(follow_symlinks=False)
                kind = _KINDS.get(stat.S_IFMT(seen.st_mode), "other")
                found.append((os.path.relpath(entry.path, work), kind, seen.st_size))
                if deep and kind == "folder":
                    folders.append(entry.path)
    return sorted(found)
