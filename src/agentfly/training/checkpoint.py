"""Checkpoints: what a run needs to go on as if it had never stopped.

    checkpoints/step-000040/
        model/                what plain transformers loads: config, weights, tokenizer (or a peft adapter)
        trainer.safetensors   optimizer, critic, generators
        trainer.json          step, place in the data, schedules, controllers
        manifest.json         the size and the checksum of every file; written last

A checkpoint is written beside its place, flushed to the disk, and then renamed, so that one is there whole or not at
all. An older one is removed only after a later one stands. What cannot be written or read is told, and harms nothing.
"""

from __future__ import annotations

import json
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
from agentfly.manifest import damage, seal, to_disk

_NAME = re.compile(r"step-(\d{6,})")


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
        """The steps that have a checkpoint, in order."""
        if not self._folder.is_dir():
            return []
        found = (_NAME.fullmatch(each.name) for each in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def load(self, step: int | None = None) -> tuple[State, Path]:
        """The state after `step`, and the folder of its model; None: the newest."""
        there = self.steps()
        if not there:
            raise ConfigError(f"there is no checkpoint in {self._folder}: the run never got that far; start it anew")
        if step is not None and step not in there:
            raise ConfigError(f"there is no checkpoint of step {step}; there are those of {', '.join(map(str, there))}")
        chosen = there[-1] if step is None else step
        place = self.path(chosen)
        if wrong := damage(place):
            others = [each for each in there if each != chosen and not damage(self.path(each))]
            cure = f"go on from a whole one with --from-step {others[-1]}" if others else "no other one is whole"
            raise DataError(f"the checkpoint {place} is damaged ({wrong}); {cure}")
        values = json.loads((place / "trainer.json").read_text(encoding="utf-8"))
        return State(values.pop("step"), load_file(place / "trainer.safetensors"), values), place / "model"

    def remove_after(self, step: int) -> None:
        """Forget what came after `step`, since it will come again."""
        for each in self.steps():
            if each > step:
                shutil.rmtree(self.path(each))


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that share no memory, as the format wants them."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def _replace(draft: Path, place: Path) -> None:
    if place.exists():  # of a run that was resumed from an earlier step
        shutil.rmtree(place)
    os.rename(draft, place)
    to_disk(place.parent)
