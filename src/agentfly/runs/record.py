"""The record of a training step that loggers receive: metrics, alarms and progress; and how it is shown as text.

Metric names are grouped by a prefix: `reward/mean`, `chain/turns`, `policy/kl`. A metric that was not measured is
missing; one that is undefined is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PHASES = ("generate", "tools", "waiting", "update", "publish", "evaluate", "save", "other")
"""The phases of a step."""
FIGURES: tuple[tuple[str, str, str], ...] = (
    ("success", "reward/success", "%"),
    ("turns", "chain/turns", ".1f"),
    ("calls", "calls/chain", ".1f"),
    ("invalid calls", "calls/invalid_rate", "%"),
    ("unknown tools", "calls/unknown_rate", "%"),
    ("tokens", "chain/sampled_tokens", ",.0f"),
    ("kl", "policy/kl", ".2g"),
    ("entropy", "policy/entropy", ".2f"),
    ("clipped", "policy/clip_fraction", "%"),
    ("grad norm", "policy/grad_norm", ".2g"),
    ("tokens/s", "throughput/tokens_per_second", ",.0f"),
    ("same reward", "group/zero_variance", "%"),
    ("lost", "treatment/lost", "%"),
    ("learner waits", "wait/learner", "%"),
    ("rollout waits", "wait/rollout", "%"),
    ("dropped", "staleness/dropped_chains", ",.0f"),
    ("recomputed", "staleness/recomputed_chains", ",.0f"),
)
"""Metrics shown for a step: label, metric name and format."""
_ONLY_NONZERO = (
    "calls/invalid_rate",
    "calls/unknown_rate",
    "treatment/lost",
    "staleness/dropped_chains",
    "staleness/recomputed_chains",
)
"""Metrics that are hidden if they are zero."""
ALL_FIGURES = (
    ("reward", "reward/mean", ".3f"),
    *FIGURES,
    ("cut off", "chain/truncated", "%"),
    ("unscored", "reward/unscored", "%"),
    ("tool errors", "calls/error_rate", "%"),
    ("staleness", "policy/staleness", ".2f"),
)
"""Metrics shown in a report."""


SOLVED = "solved"
"""The kind of alarm that is a success, no problem."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A suspected problem, with the ids of chains that show it; or that the tasks are solved."""

    kind: str
    message: str
    chains: tuple[str, ...] = ()
    """Chain ids, worst first."""
    step: int = 0
    """The step in which it was raised; its chains are in that step's trajectories."""

    @property
    def is_warning(self) -> bool:
        """Whether something may be wrong."""
        return self.kind != SOLVED


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


def figures(record: StepRecord) -> Iterable[tuple[str, str]]:
    """Label and formatted value of each metric of a step."""
    for label, name, spec in FIGURES:
        if name in record.metrics and (record.metrics[name] or name not in _ONLY_NONZERO):
            yield label, format_number(record.metrics[name], spec)


def format_number(value: float, spec: str) -> str:
    """Format a number by a format specification; `%` is a percentage with one decimal below 10 %."""
    if spec == "%":
        spec = ".1%" if 0 < value < 0.1 else ".0%"
    return f"{value:{spec}}"


def format_eval_details(held_out: EvalFigures) -> str:
    """The greedy reward and the number of unscored chains of an evaluation, if there are any."""
    greedy = held_out.metrics.get("greedy")
    unscored = held_out.metrics.get("unscored")
    details = f", greedy {greedy:.3f}" if greedy is not None else ""
    return details + (f", {unscored:.0f} chains unscored" if unscored else "")


def format_duration(seconds: float) -> str:
    """Format a duration: 42 s, 3 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
