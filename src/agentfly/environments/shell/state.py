"""What a session's folder holds, as something that can be compared with another's.

A file is its kind, its permissions and what is in it; an archive, what its members are, since the same things packed
twice are seldom the same bytes. Times do not count.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from gzip import GzipFile

from agentfly.sandbox import FileAccessError, Outcome, Session

State = Mapping[str, tuple[str, ...]]
"""By path: the kind, the permissions, and what tells the contents apart."""
MOST_FILES = 1000
_LARGEST = 8 << 20
_LIST = r"/usr/bin/find . -mindepth 1 -printf '%y\t%m\t%l\t%P\0'"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip", ".gz")


class Untold(Exception):
    """The files cannot be told: too many of them, or folders that let nobody in. Whoever left them so is not right."""


async def state_of(session: Session) -> State:
    """What is there now."""
    listed: Outcome = await session.shell(_LIST)
    lines = [line.split("\t", 3) for line in listed.output.split("\0") if line]
    if not listed.ok or listed.dropped or len(lines) > MOST_FILES:
        raise Untold(listed.message or f"{len(lines)} files")
    out = {}
    for kind, mode, target, path in lines:
        out[path] = kind, mode, await _digest(session, path) if kind == "f" else target
    return out


async def _digest(session: Session, path: str) -> str:
    try:
        data = await session.get(path, _LARGEST)
    except FileAccessError as error:
        return f"not read: {error}"
    if path.endswith(_ARCHIVES):
        data = _members(data) or data
    return hashlib.sha256(data).hexdigest()


def _members(data: bytes) -> bytes:
    """The names and contents of an archive's members, in the order of their names; nothing where it is none."""
    try:
        if data[:2] == b"\x1f\x8b":
            with GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(_LARGEST)
        found = _zipped(data) if data[:2] == b"PK" else _tarred(data)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, RuntimeError):
        return data  # what a gzip file of anything else holds
    return repr(sorted(found)).encode()


def _tarred(data: bytes) -> list[tuple[str, str]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        found = []
        for member in archive:
            file = archive.extractfile(member) if member.isreg() else None
            found.append((_plain(member.name), hashlib.sha256(file.read()).hexdigest() if file else member.linkname))
        return found


def _zipped(data: bytes) -> list[tuple[str, str]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(member.file_size for member in archive.infolist()) > _LARGEST:
            raise ValueError("too large")
        return [(_plain(each.filename), hashlib.sha256(archive.read(each)).hexdigest()) for each in archive.infolist()]


def _plain(name: str) -> str:
    return name.removeprefix("./").rstrip("/")


def changes(before: State, after: State) -> dict[str, str]:
    """What became of each path that is not as it was: A (it is there now), D (it is gone) or M."""
    paths = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    return {path: "A" if path not in before else "D" if path not in after else "M" for path in paths}
