"""Checkpoints: everything a run needs to resume with the same result.

    checkpoints/step-000040/
        model/                what transformers loads: config, weights, tokenizer (or a peft adapter)
        trainer.safetensors   state of the optimizer and the critic
        trainer.json          step, position in the tasks, updates, KL coefficient, best evaluation; with
                              asynchronous training, the chains that are finished and not trained
        manifest.json         size and checksum of every file; written last

A checkpoint is written to a temporary folder, flushed to disk and renamed, so it exists completely or not at all. An
older one is removed only after a newer one exists. A folder that is named like a checkpoint but has no manifest is
neither counted nor removed.
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
from agentfly.models.manifest import MANIFEST, find_damage, fsync_path, seal
from agentfly.runs import RunDirectory
from agentfly.training.config import TrainConfig
from agentfly.training.optimizer import LRSchedule

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{6,})")
_PARTS = ("model", "trainer.safetensors", "trainer.json")


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state of a run beside the model's weights."""

    step: int
    """Steps completed."""
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    """Values that JSON can hold."""


class CheckpointManager:
    """The checkpoints of a run; retains the newest and the best."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep`: how many of the newest are retained."""
        self._folder = folder
        self._keep = keep

    def save(self, state: TrainerState, write_model: Callable[[Path], None], *, best: int | None = None) -> Path:
        """Write a checkpoint, then remove those that are neither among the newest nor of the step `best`."""
        path = self.path(state.step)
        draft = self._folder / f".{path.name}.draft"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            (draft / "model").mkdir(parents=True)
            write_model(draft / "model")
            # safetensors refuses tensors that share memory
            tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.tensors.items()}
            save_file(tensors, draft / "trainer.safetensors")
            (draft / "trainer.json").write_text(json.dumps({"step": state.step, **state.values}), encoding="utf-8")
            # Checksums and fsync before the rename: after a power cut, a name may be on disk before the data it names.
            seal(draft)
            if path.is_dir():  # of a run that was resumed from an earlier step
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
            os.rename(draft, path)
            fsync_path(path.parent)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            steps = self.steps()
            newest = f"the one of step {steps[-1]} is complete" if steps else "there is no earlier one"
            raise DataError(
                f"the checkpoint of step {state.step} could not be written to {self._folder}: {error}; {newest}. "
                "Free some space, then resume with --resume"
            ) from error
        # After the rename: a full disk must not cost the older checkpoint that was complete.
        for step in self.steps()[: -self._keep]:
            if step != best:
                shutil.rmtree(self.path(step))
        return path

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, in order."""
        return [step for step in self.candidates() if (self.path(step) / MANIFEST).is_file()]

    def candidates(self) -> list[int]:
        """The steps for which something is named like a checkpoint, in order."""
        if not self._folder.is_dir():
            return []
        names = (path.name for path in self._folder.iterdir())
        steps = (int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        return sorted({step for step in steps if os.path.lexists(self.path(step))})

    def load(self, step: int | None = None) -> tuple[TrainerState, Path]:
        """The state after `step` and the folder of its model; None: the newest valid one, with a warning for others.

        Raises ConfigError where there is no such checkpoint, DataError where none that may be used is valid.
        """
        if step is not None:
            return self._load_step(step)
        candidates = self.candidates()
        if not candidates:
            raise ConfigError(f"there is no checkpoint in {self._folder}: the run never got that far; start it again")
        skipped = []
        for candidate in reversed(candidates):
            path = self.path(candidate)
            # A disk error in the newest checkpoint costs some steps, not the run.
            if not (damage := _find_damage(path)):
                return _read(path)
            _LOG.warning("%s is not a valid checkpoint (%s) and is skipped", path, damage)
            skipped.append(f"{path.name} ({damage})")
        raise DataError(f"no checkpoint in {self._folder} is valid: {'; '.join(skipped)}. Restore one, or start again")

    def _load_step(self, step: int) -> tuple[TrainerState, Path]:
        steps = self.steps()
        if step not in steps:
            available = f"there are those of {', '.join(map(str, steps))}" if steps else "there is none"
            raise ConfigError(f"there is no checkpoint of step {step}; {available}")
        path = self.path(step)
        if damage := _find_damage(path):
            valid = [other for other in steps if other != step and not _find_damage(self.path(other))]
            advice = f"resume from a valid one with --from-step {valid[-1]}" if valid else "no other one is valid"
            raise DataError(f"the checkpoint {path} is damaged ({damage}); {advice}")
        return _read(path)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints after `step`, which will be written again."""
        for saved_step in self.steps():
            if saved_step > step:
                shutil.rmtree(self.path(saved_step))


def _find_damage(path: Path) -> str:
    """Why a folder is not a valid checkpoint; empty if it is one."""
    missing = (f"{name} is missing" for name in _PARTS if not (path / name).exists())
    return find_damage(path) or next(missing, "")


def _read(path: Path) -> tuple[TrainerState, Path]:
    values = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    return TrainerState(values.pop("step"), load_file(path / "trainer.safetensors"), values), path / "model"


SAFE_CHANGES = (
    "steps", "gpus", "loggers", "checkpoint.every", "checkpoint.keep", "evaluation.every", "micro_batch_tokens",
    "gradient_checkpointing",
)  # fmt: skip
"""Fields that a resumed run may change: they do not alter what the finished steps did."""


def refuse_unsafe_changes(config: TrainConfig, run: RunDirectory) -> None:
    """Raise ConfigError if a run is resumed with other values of fields that are not safe to change.

    Fields that did not exist when the run was started have their default.
    """
    stored = {**TrainConfig().to_json(), **run.config}
    for name, value in json.loads(json.dumps(config.flat())).items():
        head, _, inner = name.partition(".")
        before = stored.get(head)
        if inner:
            before = before.get(inner) if isinstance(before, Mapping) else None
        if before != value and name not in SAFE_CHANGES:
            raise ConfigError(
                f"the run in {run.path} was started with {name}={before!r}, and is resumed with {value!r}: its steps "
                "so far were trained with the first value. Set it back, or start another run from the model of a "
                f"checkpoint; a resumed run may change {', '.join(SAFE_CHANGES)}"
            )
    done = max((record.step for record in run.records()), default=0)
    if config.steps < done and config.steps != stored["steps"]:
        raise ConfigError(f"the run in {run.path} has completed {done} steps: steps={config.steps} is fewer")
    optimizer = config.optimizer
    if config.steps != stored["steps"] and optimizer.schedule != "constant":
        schedule = LRSchedule(optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule, config.steps)
        _LOG.warning(
            "optimizer.schedule=%s is stretched from %s to %s steps: the learning rate continues at %.3g",
            optimizer.schedule, stored["steps"], config.steps, schedule.at(done),
        )  # fmt: skip
