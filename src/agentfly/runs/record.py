"""The record of a training step that loggers receive: metrics, alarms and progress.

Metric names are grouped by a prefix: `reward/mean`, `chain/turns`, `policy/kl`. A metric that was not measured is
missing; one that is undefined is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("generate", "tools", "waiting", "update", "publish", "evaluate", "save", "other")
"""The phases of a step."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A suspected problem, with the ids of chains that show it."""

    kind: str
    message: str
    chains: tuple[str, ...] = ()
    """Chain ids, worst first."""
    step: int = 0
    """The step in which it was raised; its chains are in that step's trajectories."""


@dataclass(frozen=True, slots=True)
class EvalFigures:
    """The result of an evaluation on held-out tasks."""

    reward: float
    low: float
    """Lower bound of the 95 % confidence interval of the reward; NaN if unknown."""
    high: float
    tasks: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further metrics."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress within a step, reported on every change."""

    phase: str
    """One of `PHASES`, or another description."""
    done: int = 0
    total: int = 0
    """0 if unknown."""
    leased: int = 0
    """Environments leased by chains."""
    waiting: int = 0
    """Chains waiting for an environment."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A finished step. Step 0 is the evaluation before training and has only `eval`."""

    step: int
    steps: int
    """Total number of steps of the run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each phase; their sum is the duration of the step."""
    eval: EvalFigures | None = None
    """None if no evaluation followed the step."""
    leased: int = 0
    """Maximum number of environments leased at the same time."""
    waiting: int = 0
    """Maximum number of chains waiting at the same time."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms raised in this step."""

    def flat(self) -> dict[str, float]:
        """All metrics by name, as written to files and dashboards."""
        out = dict(self.metrics)
        if self.seconds:
            out.update({f"time/{phase}": seconds for phase, seconds in self.seconds.items()})
            out.update({"environments/leased": self.leased, "environments/waiting": self.waiting})
        if self.eval is not None:
            out.update({f"eval/{name}": value for name, value in self.eval.metrics.items()})
            out.update({"eval/reward": self.eval.reward, "eval/low": self.eval.low, "eval/high": self.eval.high})
        return {name: float(value) for name, value in out.items()}  # numpy and torch scalars become floats
