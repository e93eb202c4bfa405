"""Figures in words: what is shown of a step, and how numbers and times are written."""

from __future__ import annotations

from collections.abc import Iterable

from agentfly.runs.record import EvalFigures, StepRecord

FIGURES: tuple[tuple[str, str, str], ...] = (
    ("success", "reward/success", "%"),
    ("turns", "chain/turns", ".1f"),
    ("calls", "calls/chain", ".1f"),
    ("tokens", "chain/sampled_tokens", ",.0f"),
    ("kl", "policy/kl", ".2g"),
    ("entropy", "policy/entropy", ".2f"),
    ("clipped", "policy/clip_fraction", "%"),
    ("grad norm", "policy/grad_norm", ".2g"),
    ("tokens/s", "throughput/tokens_per_second", ",.0f"),
    ("same reward", "group/zero_variance", "%"),
    ("lost", "treatment/lost", "%"),
)
"""What is shown of a step: its word, the metric, and how to write it."""
_WORTH_SAYING = ("treatment/lost",)
"""What is shown only where there is any of it."""
CONTROL = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that a terminal obeys and a page cannot show, each with what stands for it."""
ALL_FIGURES = (
    ("reward", "reward/mean", ".3f"),
    *FIGURES,
    ("cut off", "chain/truncated", "%"),
    ("unscored", "reward/unscored", "%"),
    ("tool errors", "calls/error_rate", "%"),
    ("invalid calls", "calls/invalid_rate", "%"),
    ("unknown tools", "calls/unknown_rate", "%"),
    ("staleness", "policy/staleness", ".2f"),
)
"""What a report shows."""


def sanitize(text: str) -> str:
    """The text without control characters other than newline and tab: models and tools write what a terminal obeys."""
    return text.translate(CONTROL)


def figures(record: StepRecord) -> Iterable[tuple[str, str]]:
    """What was measured of a step, in words."""
    for word, name, how in FIGURES:
        if name in record.metrics and (record.metrics[name] or name not in _WORTH_SAYING):
            yield word, written(record.metrics[name], how)


def written(value: float, how: str) -> str:
    """A number as `how` says: a format, or `%` for a share."""
    if how == "%":
        how = ".1%" if 0 < value < 0.1 else ".0%"
    return f"{value:{how}}"


def beside(held_out: EvalFigures) -> str:
    """What else is to be said of an evaluation: how greedy chains did, and whether any could not be scored."""
    greedy, unscored = held_out.metrics.get("greedy"), held_out.metrics.get("unscored")
    said = f", greedy {greedy:.3f}" if greedy is not None else ""
    return said + (f", {unscored:.0f} chains unscored" if unscored else "")


def duration(seconds: float) -> str:
    """A time as one says it: 42 s, 3 min, 2 h 05 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
