"""A folder with a manifest: the size and the checksum of every file in it, so that damage is found before it harms.

A folder is made beside its place, sealed, and then renamed: it is there whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

MANIFEST = "manifest.json"


def seal(folder: Path, **told: str) -> None:
    """Write the manifest, and everything to disk: a rename must not get there before what it names.

    `told`: what else the manifest says, about the folder as a whole.
    """
    inside = sorted(folder.rglob("*"))
    files = {
        path.relative_to(folder).as_posix(): (path.stat().st_size, sha256(path)) for path in inside if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({**told, "files": files}, indent=2) + "\n", encoding="utf-8")
    for path in (*inside, folder / MANIFEST, folder):
        to_disk(path)


def damage(folder: Path, *, thorough: bool = True) -> str:
    """What is wrong with a sealed folder; empty: nothing. `thorough` compares checksums, else only sizes."""
    try:
        named = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        files = {str(name): (int(size), str(checksum)) for name, (size, checksum) in named.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, (size, checksum) in files.items():
        try:
            there = (folder / name).stat().st_size
            if there != size:
                return f"{name} has {there} bytes, not {size}"
            if thorough and sha256(folder / name) != checksum:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_disk(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
