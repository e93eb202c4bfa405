"""Models that were made here once, each in a folder that is there whole or not at all.

A model is made in a folder beside its place, which is written to disk and then renamed: killed at any moment, a
preparation leaves nothing that could be taken for a model, and the next one removes what it left. A lock lets one
process at a time prepare a model; the others wait for its result.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentfly.errors import ConfigError

MANIFEST = "manifest.json"
"""The sizes and checksums of the other files of a model."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that can be had without a hub, once it was prepared."""

    name: str
    version: str
    """Another version is another folder."""
    source: str
    """Where it comes from, in a few words."""
    licence: str
    parameters: int
    size: int
    """Bytes on disk, about."""
    build: Callable[[Path, Path], None]
    """Writes the model's files into the first folder; the second is for what need not stay."""

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        return root() / f"{self.name}-{self.version}"


def root() -> Path:
    """The folder of all prepared models."""
    if own := os.environ.get("AGENTFLY_CACHE"):
        return Path(own).expanduser().absolute() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "agentfly" / "models"


def ready(model: Prepared, *, thorough: bool = False) -> Path:
    """The folder of a model, which is prepared first where it is absent or broken; `thorough` reads every byte."""
    if not fault(model, thorough=thorough):
        return model.folder
    try:
        root().mkdir(parents=True, exist_ok=True)
        with _locked(model):
            if wrong := fault(model, thorough=thorough):
                _LOG.warning("preparing %s in %s (%s): %s", model.name, model.folder, wrong, model.source)
                _prepare(model)
    except OSError as error:
        raise ConfigError(
            f"{model.name} cannot be prepared in {root()}: {error}. AGENTFLY_CACHE may name another folder"
        ) from error
    return model.folder


def fault(model: Prepared, *, thorough: bool = False) -> str:
    """What is wrong with a prepared model; empty: nothing. `thorough` compares checksums, else only sizes."""
    folder = model.folder
    if not folder.exists():
        return "it is not prepared"
    try:
        files = {str(name): (int(size), str(sum)) for name, (size, sum) in _manifest(folder).items()}
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


def _manifest(folder: Path) -> dict[str, tuple[int, str]]:
    files: dict[str, tuple[int, str]] = json.loads((folder / MANIFEST).read_text())["files"]
    return files


@contextmanager
def _locked(model: Prepared) -> Iterator[None]:
    """Hold the right to prepare a model. The lock goes with the process, however it ends."""
    with (root() / f".{model.folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _LOG.warning("another process is preparing %s; waiting for it", model.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare(model: Prepared) -> None:
    beside = f".{model.folder.name}.part-"
    for left in root().glob(f"{beside}*"):
        shutil.rmtree(left)
    # Its name is its own, so that what a killed preparation may still have running writes to a folder that is gone.
    part = Path(tempfile.mkdtemp(prefix=beside, dir=root()))
    try:
        made, scratch = part / "model", part / "scratch"
        made.mkdir()
        scratch.mkdir()
        model.build(made, scratch)
        _seal(made, model)
        if model.folder.exists():
            model.folder.rename(part / "broken")
        made.rename(model.folder)
        _to_disk(root())
    finally:
        shutil.rmtree(part)


def _seal(folder: Path, model: Prepared) -> None:
    """Write the manifest, and everything to disk: a rename must not get there before what it names."""
    files = {path.name: (path.stat().st_size, sha256(path)) for path in sorted(folder.iterdir())}
    told = {"model": model.name, "version": model.version, "source": model.source, "files": files}
    (folder / MANIFEST).write_text(json.dumps(told, indent=2) + "\n")
    for path in folder.iterdir():
        _to_disk(path)
    _to_disk(folder)


def _to_disk(path: Path) -> None:
    at = os.open(path, os.O_RDONLY)
    try:
        os.fsync(at)
    finally:
        os.close(at)
