"""Cache of models built on this machine. A model's folder is complete or absent.

A model is built in a temporary folder next to its final one, flushed to disk and renamed: a build killed at any moment
leaves nothing that could be mistaken for a model, and the next build removes its remains. A file lock lets one process
at a time build a model; the others wait for the result.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentfly.errors import ConfigError
from agentfly.models.manifest import find_damage, fsync_path, seal
from agentfly.runs.files import lock_file

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that is built locally and needs no hub."""

    name: str
    version: str
    """Part of the folder name: each version has its own folder."""
    source: str
    """Short description of the model's origin."""
    license: str
    parameters: int
    size: int
    """Approximate size on disk in bytes."""
    build: Callable[[Path, Path], None]
    """Writes the model's files into the first folder; the second is scratch space."""

    @property
    def folder(self) -> Path:
        """The model's folder, whether or not it exists yet."""
        return cache_root() / f"{self.name}-{self.version}"


def cache_root() -> Path:
    """The folder of all prepared models."""
    if root := os.environ.get("AGENTFLY_CACHE"):
        return Path(root).expanduser().absolute() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "agentfly" / "models"


def prepare_model(model: PreparedModel, *, thorough: bool = False) -> Path:
    """Return the model's folder; build the model first if it is missing or damaged. `thorough` verifies checksums."""
    if not find_fault(model, thorough=thorough):
        return model.folder
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
        # The kernel releases the lock when the process ends, however it ends.
        with (cache_root() / f".{model.folder.name}.lock").open("w") as lock:
            try:
                lock_file(lock)
            except BlockingIOError:
                _LOG.warning("another process is preparing %s; waiting for it", model.name)
                lock_file(lock, wait=True)
            if fault := find_fault(model, thorough=thorough):
                _LOG.warning("preparing %s in %s (%s): %s", model.name, model.folder, fault, model.source)
                _build(model)
    except OSError as error:
        raise ConfigError(
            f"{model.name} cannot be prepared in {cache_root()}: {error}. AGENTFLY_CACHE may name another folder"
        ) from error
    return model.folder


def find_fault(model: PreparedModel, *, thorough: bool = False) -> str:
    """Describe what is wrong with a prepared model; empty if nothing is. `thorough` verifies checksums, not sizes."""
    return find_damage(model.folder, thorough=thorough) if model.folder.exists() else "it is not prepared"


def _build(model: PreparedModel) -> None:
    prefix = f".{model.folder.name}.part-"
    for remains in cache_root().glob(f"{prefix}*"):
        shutil.rmtree(remains)
    # A unique name: processes that a killed build left running write to a folder that no longer exists.
    draft = Path(tempfile.mkdtemp(prefix=prefix, dir=cache_root()))
    try:
        folder = draft / "model"
        folder.mkdir()
        scratch = draft / "scratch"
        scratch.mkdir()
        model.build(folder, scratch)
        seal(folder, model=model.name, version=model.version, source=model.source)
        if model.folder.exists():
            model.folder.rename(draft / "broken")
        folder.rename(model.folder)
        fsync_path(cache_root())
    finally:
        shutil.rmtree(draft)
