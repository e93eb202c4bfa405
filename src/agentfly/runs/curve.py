"""The reward of a run as a picture: every step, the smoothed course, and held-out tasks with how sure they are."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentfly.extras import needed
from agentfly.runs.directory import RunDirectory
from agentfly.runs.files import replace
from agentfly.runs.record import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN, HELD_OUT, FAINT = "#2563eb", "#d97706", "#64748b"


def write_curve(directory: RunDirectory) -> None:
    """Draw the curve into the run's folder."""
    buffer = io.BytesIO()
    draw(directory.records(), directory.name).savefig(buffer, dpi=160)
    replace(directory.curve, buffer.getvalue())


def draw(records: Sequence[StepRecord], title: str = "") -> Figure:
    """The curve as a figure that belongs to nobody: matplotlib's own state and windows are not touched."""
    with needed("the reward curve", "train"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    _training(axes, records)
    _held_out(axes, records)
    # Dollar signs in a name would be read as formulas.
    axes.set_title(title.replace("$", r"\$"), loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("step", color=FAINT)
    axes.set_ylabel("reward", color=FAINT)
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=FAINT, length=0)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best", fontsize=9, labelcolor=FAINT)
    return figure


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of the steps around each, so that the course neither lags nor starts at nothing."""
    half = max(len(values) // 40, 1)
    around = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(each) / len(each) for each in around]


def _training(axes: Axes, records: Sequence[StepRecord]) -> None:
    points = [(r.step, r.metrics.get("reward/mean", math.nan)) for r in records]
    points = [(step, reward) for step, reward in points if math.isfinite(reward)]
    if not points:
        return
    steps, rewards = zip(*points, strict=True)
    axes.plot(steps, rewards, color=TRAIN, alpha=0.25, linewidth=1, marker="." if len(steps) < 3 else None)
    axes.plot(steps, smoothed(rewards), color=TRAIN, linewidth=2, label="training tasks")


def _held_out(axes: Axes, records: Sequence[StepRecord]) -> None:
    known = [(r.step, r.eval) for r in records if r.eval is not None and math.isfinite(r.eval.reward)]
    if not known:
        return
    rewards = [each.reward for _, each in known]
    sure = [(max(each.reward - each.low, 0.0), max(each.high - each.reward, 0.0)) for _, each in known]
    spread: Any = [[0.0 if math.isnan(half) else half for half in side] for side in zip(*sure, strict=True)]
    style: dict[str, Any] = {"color": HELD_OUT, "capsize": 3, "linewidth": 1.5, "fmt": "-o", "markersize": 5}
    axes.errorbar([step for step, _ in known], rewards, spread, label="held-out tasks, 95 % interval", **style)
