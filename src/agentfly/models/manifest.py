"""Folders with a manifest: size and SHA-256 of every file, so that damage is detected before the folder is used.

A folder is written beside its final path, sealed, and then renamed: it exists completely or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

MANIFEST = "manifest.json"


def seal(folder: Path, **info: str) -> None:
    """Write the manifest and fsync everything, so that a later rename never precedes the contents.

    info: further entries of the manifest.
    """
    inside = sorted(folder.rglob("*"))
    files = {
        path.relative_to(folder).as_posix(): (path.stat().st_size, sha256(path)) for path in inside if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({**info, "files": files}, indent=2) + "\n", encoding="utf-8")
    for path in (*inside, folder / MANIFEST, folder):
        fsync_path(path)


def find_damage(folder: Path, *, thorough: bool = True) -> str:
    """Describe the damage of a sealed folder; empty if there is none. `thorough` compares checksums, else sizes."""
    try:
        named = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        files = {str(name): (int(size), str(checksum)) for name, (size, checksum) in named.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, (size, checksum) in files.items():
        try:
            actual_size = (folder / name).stat().st_size
            if actual_size != size:
                return f"{name} has {actual_size} bytes, not {size}"
            if thorough and sha256(folder / name) != checksum:
                return f"{name} is not what was written: its checksum differs"
        except OSError as error:
            return f"{name}: {error.strerror}"
    return ""


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
