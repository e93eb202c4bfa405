"""Models that were made here once, each in a folder that is there whole or not at all.

A model is made in a folder beside its place, which is written to disk and then renamed: killed at any moment, a
preparation leaves nothing that could be taken for a model, and the next one removes what it left. A lock lets one
process at a time prepare a model; the others wait for its result.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentfly.errors import ConfigError
from agentfly.manifest import damage, seal, to_disk

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
    return damage(model.folder, thorough=thorough) if model.folder.exists() else "it is not prepared"


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
        seal(made, model=model.name, version=model.version, source=model.source)
        if model.folder.exists():
            model.folder.rename(part / "broken")
        made.rename(model.folder)
        to_disk(root())
    finally:
        shutil.rmtree(part)
