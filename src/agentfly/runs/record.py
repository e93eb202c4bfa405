"""What a training step hands to whoever watches: figures, alarms, and how far it is.

Metric names have slashes, the first word says whose they are: `reward/mean`, `chain/turns`, `policy/kl`. A figure that
nobody measured is missing; one that is no number is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PHASES = ("generate", "tools", "waiting", "update", "publish", "evaluate", "save", "other")
"""Where the time of a step goes."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that looks wrong, and the chains in which to look for it."""

    kind: str
    message: str
    chains: tuple[str, ...] = ()
    """Ids of the chains that show it best, worst first."""
    step: int = 0
    """The step in which it was noticed; its chains are in that step's trajectories."""


@dataclass(frozen=True, slots=True)
class EvalFigures:
    """How the model did on tasks that it is not trained on."""

    reward: float
    low: float
    """The lower end of the 95 % confidence interval of the reward; NaN where nothing can be said."""
    high: float
    tasks: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Whatever else was measured."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a step is, told as often as anything changes."""

    phase: str
    """One of `PHASES`, or any other word for what is being done."""
    done: int = 0
    total: int = 0
    """0 where nobody knows."""
    lent: int = 0
    """Environments that chains hold."""
    waiting: int = 0
    """Chains that wait for one."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step. Step 0 is the evaluation before training, and has an `eval` alone."""

    step: int
    steps: int
    """How many the run takes in all."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of the step, by phase; they add up to what it took."""
    eval: EvalFigures | None = None
    """None where the step was not followed by an evaluation."""
    lent: int = 0
    """Most environments that were lent at once."""
    waiting: int = 0
    """Most chains that waited for one at once."""
    alarms: tuple[Alarm, ...] = ()
    """What was noticed in this step."""

    def flat(self) -> dict[str, float]:
        """Every figure under its name, as files and dashboards keep them."""
        out = dict(self.metrics)
        if self.seconds:
            out.update({f"time/{phase}": seconds for phase, seconds in self.seconds.items()})
            out.update({"environments/lent": self.lent, "environments/waiting": self.waiting})
        if self.eval is not None:
            out.update({f"eval/{name}": value for name, value in self.eval.metrics.items()})
            out.update({"eval/reward": self.eval.reward, "eval/low": self.eval.low, "eval/high": self.eval.high})
        return {name: float(value) for name, value in out.items()}  # numpy and torch have numbers of their own
