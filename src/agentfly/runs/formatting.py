"""Formatting of metrics, numbers and durations for the console and the report."""

from __future__ import annotations

from collections.abc import Iterable

from agentfly.runs.record import EvalFigures, StepRecord

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
