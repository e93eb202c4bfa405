"""File trees and outputs of shell commands, and their comparison.

A file is compared by type, permissions and content; an archive by the names and contents of its members, since packing
the same files twice rarely gives the same bytes. Times are ignored.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from gzip import GzipFile

from agentfly.sandbox import FileAccessError, Outcome, Session

FileState = Mapping[str, tuple[str, ...]]
"""Path → file type, permissions, and digest of the content (or target of a link)."""
MAX_FILES = 1000
_MAX_BYTES = 8 << 20
"""Largest file, and largest content of an archive."""
_LIST_COMMAND = r"/usr/bin/find . -mindepth 1 -printf '%y\t%m\t%l\t%P\0'"
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip", ".gz")
_WORD = re.compile(r"\w\w+")


class UnreadableState(Exception):
    """The file tree cannot be read: too many files, or folders without permission."""


async def read_state(session: Session) -> FileState:
    """Read the file tree of a session. Raises UnreadableState."""
    listing: Outcome = await session.shell(_LIST_COMMAND)
    lines = [line.split("\t", 3) for line in listing.output.split("\0") if line]
    if not listing.ok or listing.dropped or len(lines) > MAX_FILES:
        raise UnreadableState(listing.message or f"{len(lines)} files")
    state = {}
    for kind, mode, target, path in lines:
        if kind != "f":
            state[path] = kind, mode, target
            continue
        try:
            data = await session.get(path, _MAX_BYTES)
        except FileAccessError as error:
            state[path] = kind, mode, f"not read: {error}"
            continue
        if path.endswith(_ARCHIVES):
            data = _unpack(data) or data
        state[path] = kind, mode, hashlib.sha256(data).hexdigest()
    return state


def _unpack(data: bytes) -> bytes:
    """Serialize the sorted names and contents of an archive's members, or return the decompressed data."""
    members: list[tuple[str, str]] = []
    try:
        if data[:2] == b"\x1f\x8b":
            with GzipFile(fileobj=io.BytesIO(data)) as compressed:
                data = compressed.read(_MAX_BYTES)
        if data[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(data)) as zip_file:
                if sum(member.file_size for member in zip_file.infolist()) > _MAX_BYTES:
                    raise ValueError("too large")
                members = [
                    (info.filename, hashlib.sha256(zip_file.read(info)).hexdigest()) for info in zip_file.infolist()
                ]
        else:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar_file:
                for member in tar_file:
                    file = tar_file.extractfile(member) if member.isreg() else None
                    digest = hashlib.sha256(file.read()).hexdigest() if file else member.linkname
                    members.append((member.name, digest))
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, RuntimeError):
        return data
    return repr(sorted((name.removeprefix("./").rstrip("/"), digest) for name, digest in members)).encode()


def diff_states(before: FileState, after: FileState) -> dict[str, str]:
    """Map each changed path to A (added), D (deleted) or M (modified)."""
    paths = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    return {path: "A" if path not in before else "D" if path not in after else "M" for path in paths}


def equal_output(text: str, gold: str, *, ordered: bool) -> bool:
    """Whether two outputs have the same lines. Whitespace, empty lines and a leading `./` are ignored."""
    ours, theirs = (
        [" ".join(line.split()).removeprefix("./") for line in each.splitlines() if line.strip()]
        for each in (text, gold)
    )
    return ours == theirs if ordered else sorted(ours) == sorted(theirs)


def text_similarity(text: str, gold: str) -> float:
    """Cosine similarity of the TF-IDF vectors of two texts, as in InterCode."""
    ours, theirs = (Counter(_WORD.findall(each.lower())) for each in (text, gold))
    if not ours or not theirs:
        return float(text.split() == gold.split())
    weight = {word: math.log(3 / (1 + (word in ours) + (word in theirs))) + 1 for word in ours | theirs}

    def dot(one: Counter[str], other: Counter[str]) -> float:
        return sum(one[word] * other[word] * weight[word] ** 2 for word in one.keys() & other.keys())

    return dot(ours, theirs) / math.sqrt(dot(ours, ours) * dot(theirs, theirs))
