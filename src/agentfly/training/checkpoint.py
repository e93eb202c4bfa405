"""Checkpoints: what a run needs to go on as if it had never stopped.

    checkpoints/step-000040/
        model/                what plain transformers loads: config, weights, tokenizer (or a peft adapter)
        trainer.safetensors   optimizer, critic, generators
        trainer.json          step, place in the data, schedules, controllers
        manifest.json         the size and the checksum of every file; written last

A checkpoint is written beside its place, flushed to the disk, and then renamed, so that one is there whole or not at
all. An older one is removed only after a later one stands. What cannot be written or read is told, and harms nothing.
A folder that is named like a checkpoint but was never sealed is neither counted nor removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from agentfly.errors import ConfigError, DataError
from agentfly.manifest import MANIFEST, damage, seal, to_disk

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{6,})")
_PARTS = ("model", "trainer.safetensors", "trainer.json")


@dataclass(frozen=True, slots=True)
class State:
    """What the trainer remembers beside the model's weights."""

    step: int
    """Steps that were done."""
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    """Anything that JSON can keep."""


class Checkpoints:
    """The checkpoints of a run, the newest and the best of which are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def save(self, state: State, write_model: Callable[[Path], None], *, best: int | None = None) -> Path:
        """Write a checkpoint; then remove those that are neither among the newest nor of the step `best`."""
        place = self._folder / f"step-{state.step:06d}"
        draft = self._folder / f".{place.name}.draft"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            (draft / "model").mkdir(parents=True)
            write_model(draft / "model")
            save_file(_apart(state.tensors), draft / "trainer.safetensors")
            (draft / "trainer.json").write_text(json.dumps({"step": state.step, **state.values}), encoding="utf-8")
            seal(draft)
            _replace(draft, place)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            said = f"the checkpoint of step {state.step} could not be written to {self._folder}: {error}"
            last = self.steps()
            kept = f"step {last[-1]} is whole" if last else "there is no earlier one"
            raise DataError(f"{said}; {kept}. Free some space, then go on with --resume") from error
        for step in self.steps()[: -self._keep]:
            if step != best:
                shutil.rmtree(self.path(step))
        return place

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """The steps that have a sealed checkpoint, in order."""
        return [step for step in self.candidates() if (self.path(step) / MANIFEST).is_file()]

    def candidates(self) -> list[int]:
        """The steps for which something is named like a checkpoint, in order."""
        if not self._folder.is_dir():
            return []
        names = (each.name for each in self._folder.iterdir())
        steps = (int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        return sorted({step for step in steps if os.path.lexists(self.path(step))})

    def load(self, step: int | None = None) -> tuple[State, Path]:
        """The state after `step`, and the folder of its model; None: the newest valid one, with a warning for others.

        Raises ConfigError where there is no such checkpoint, DataError where none that may be used is valid.
        """
        if step is not None:
            return self._load_step(step)
        there = self.candidates()
        if not there:
            raise ConfigError(f"there is no checkpoint in {self._folder}: the run never got that far; start it anew")
        skipped = []
        for each in reversed(there):
            place = self.path(each)
            if not (wrong := _find_damage(place)):
                return _read(place)
            _LOG.warning("%s is not a valid checkpoint (%s) and is skipped", place, wrong)
            skipped.append(f"{place.name} ({wrong})")
        raise DataError(f"no checkpoint in {self._folder} is valid: {'; '.join(skipped)}. Restore one, or start anew")

    def _load_step(self, step: int) -> tuple[State, Path]:
        there = self.steps()
        if step not in there:
            known = f"there are those of {', '.join(map(str, there))}" if there else "there is none"
            raise ConfigError(f"there is no checkpoint of step {step}; {known}")
        place = self.path(step)
        if wrong := _find_damage(place):
            others = [each for each in there if each != step and not _find_damage(self.path(each))]
            cure = f"go on from a whole one with --from-step {others[-1]}" if others else "no other one is whole"
            raise DataError(f"the checkpoint {place} is damaged ({wrong}); {cure}")
        return _read(place)

    def remove_after(self, step: int) -> None:
        """Forget what came after `step`, since it will come again."""
        for each in self.steps():
            if each > step:
                shutil.rmtree(self.path(each))


def _find_damage(place: Path) -> str:
    """What keeps a folder from being a valid checkpoint; empty: nothing."""
    missing = (f"{name} is missing" for name in _PARTS if not (place / name).exists())
    return damage(place) or next(missing, "")


def _read(place: Path) -> tuple[State, Path]:
    values = json.loads((place / "trainer.json").read_text(encoding="utf-8"))
    return State(values.pop("step"), load_file(place / "trainer.safetensors"), values), place / "model"


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory, as the format wants them."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def _replace(draft: Path, place: Path) -> None:
    if place.exists():  # of a run that was resumed from an earlier step
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink()
    os.rename(draft, place)
    to_disk(place.parent)
