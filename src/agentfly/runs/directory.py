"""The folder of a training run, as anybody may read it while the run goes on or after it ended.

    config.json                         the settings in effect
    recipe.py                           the recipe it was started from, if any
    metrics.jsonl                       a line a step
    evals.jsonl                         a line an evaluation; step 0 is before training
    alarms.jsonl                        a line an alarm
    trajectories/step-000012.jsonl.gz   the chains of a step, with the advantage of each token
    trajectories/eval-000012.jsonl.gz   the chains of the evaluation after it
    checkpoints/                        what resuming needs
    reward.png, report.html             written at the end

A run that was killed leaves at most one torn line at the end of each file; readers leave it out, resuming cuts it.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentfly.errors import DataError
from agentfly.runs.files import read_lines
from agentfly.runs.record import Alarm, EvalFigures, StepRecord
from agentfly.segment import Floats
from agentfly.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain as the run keeps it."""

    trajectory: Trajectory
    advantages: tuple[Floats, ...] = ()
    """For each segment one number a token; empty for a chain that nothing was learned from."""


class RunDirectory:
    """Everything a training run leaves on disk. This one reads; a `RunWriter` writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        if not self._config.is_file():
            raise DataError(f"{self.path} holds no run: there is no {self._config.name} in it")

    @property
    def _config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evals_file(self) -> Path:
        return self.path / "evals.jsonl"

    @property
    def alarms_file(self) -> Path:
        return self.path / "alarms.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints; the trainer's own."""
        return self.path / "checkpoints"

    @property
    def curve(self) -> Path:
        return self.path / "reward.png"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def config(self) -> dict[str, Any]:
        """The settings in effect."""
        try:
            value = json.loads(self._config.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{self._config} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise DataError(f"{self._config} must be a JSON object, not a {type(value).__name__}")
        return value

    @property
    def name(self) -> str:
        """After its recipe, or else its folder."""
        return Path(self.config.get("recipe") or self.path.resolve()).stem

    def records(self) -> list[StepRecord]:
        """The steps so far, in order, each with its evaluation and alarms."""
        metrics = {_step(line): line for line in read_lines(self.metrics_file)}
        evals = {_step(line): line for line in read_lines(self.evals_file)}
        alarms = self.alarms()
        return [
            _record(step, metrics.get(step, {}), evals.get(step), tuple(a for a in alarms if a.step == step))
            for step in sorted(metrics.keys() | evals.keys())
        ]

    def alarms(self) -> list[Alarm]:
        lines = read_lines(self.alarms_file)
        return [Alarm(line["kind"], line["message"], tuple(line["chains"]), _step(line)) for line in lines]

    def trajectories(self, step: int, *, held_out: bool = False) -> list[Stored]:
        """The chains of a step, or of the evaluation after it; none where none were kept."""
        path = self.trajectory_file(step, held_out=held_out)
        if not path.is_file():
            return []
        try:
            lines = gzip.decompress(path.read_bytes()).splitlines()
            return [_stored(json.loads(line)) for line in lines]
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def trajectory_file(self, step: int, *, held_out: bool = False) -> Path:
        return self.path / "trajectories" / f"{'eval' if held_out else 'step'}-{step:06}.jsonl.gz"


def _step(line: Mapping[str, Any]) -> int:
    step = line.get("step")
    if not isinstance(step, int):
        raise DataError(f"a line of the run has no step: {line!r:.120}")
    return step


def _record(
    step: int, line: Mapping[str, Any], held_out: Mapping[str, Any] | None, alarms: tuple[Alarm, ...]
) -> StepRecord:
    figures = _numbers(line)
    metrics = {name: value for name, value in figures.items() if name.partition("/")[0] not in _ELSEWHERE}
    seconds = {name[5:]: value for name, value in figures.items() if name.startswith("time/")}
    evaluation = None
    if held_out is not None:
        known = _numbers(held_out)
        reward, low, high = (known.get(name, math.nan) for name in ("reward", "low", "high"))
        evaluation = EvalFigures(reward, low, high, int(known.get("tasks", 0)), _numbers(held_out.get("metrics", {})))
    lent, waiting = (int(figures.get(f"environments/{name}", 0)) for name in ("lent", "waiting"))
    steps = int((held_out or line)["steps"])
    return StepRecord(step, steps, metrics, seconds, evaluation, lent, waiting, alarms)


_ELSEWHERE = ("step", "steps", "time", "environments")
"""First words of the names that a record keeps outside its metrics."""


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line; null is a number that was none."""
    read = {name: math.nan if value is None else value for name, value in line.items()}
    return {name: float(value) for name, value in read.items() if isinstance(value, int | float)}


def _stored(value: Mapping[str, Any]) -> Stored:
    advantages = tuple(np.array(each, np.float32) for each in value["advantages"])
    return Stored(Trajectory.from_json(value["trajectory"]), advantages)
