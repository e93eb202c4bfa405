"""The report of a run: one self-contained HTML page and the reward curve as PNG.

The page loads nothing from the network, and model output in it is escaped.
"""

from __future__ import annotations

import io
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import escape

from agentfly.errors import ConfigError, require_extra, sanitize
from agentfly.runs.directory import RunDirectory
from agentfly.runs.files import write_atomic
from agentfly.runs.record import ALL_FIGURES, PHASES, StepRecord, format_duration, format_number
from agentfly.runs.thumbnails import describe_image, make_thumbnail
from agentfly.segment import AUTHOR_COLORS, Author
from agentfly.trajectory import Trajectory
from agentfly.types import Image

_LOG = logging.getLogger(__name__)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAIN = "#2563eb"
HELD_OUT = "#d97706"
FAINT = "#64748b"
Decode = Callable[[Sequence[int]], str]
MAX_TEXT = 6000
"""Maximum number of characters shown of a span; the rest is in the run directory."""
MAX_PROMPT = 240
"""Maximum number of characters shown of a prompt."""
MAX_TASKS = 3
"""Number of held-out tasks shown before and after training."""
MAX_CHAINS = 12
"""Maximum number of chains shown for alarms."""
MAX_STEPS = 5
"""Number of first and last steps that metrics are averaged over."""
MAX_IMAGE_BYTES = 4 << 20
"""Maximum size of all thumbnails of a report together; further images are shown as labels."""
_PLACEHOLDERS = re.compile(r"(<[^<>\s]{1,60}>)\1{3,}")
"""The placeholder tokens of an image."""


@dataclass(frozen=True, slots=True)
class ReportChain:
    """A chain as the report shows it."""

    name: str
    anchor: str
    spans: list[tuple[str, str, str, list[str]]]
    """Style, author, text, and the images as `data:` URIs, or as labels, of each span."""


def write_report_files(directory: RunDirectory, decode: Decode | None = None) -> list[Path]:
    """Write the report and the reward curve; return the files. Without the plotting library, a warning and no curve."""
    curves = [directory.curve]
    try:
        write_curve(directory)
    except ConfigError as missing:
        _LOG.warning("%s", missing)
        curves = []
    write_report(directory, decode)  # last: a run with a report is finished
    return [directory.report, *curves]


def write_report(directory: RunDirectory, decode: Decode | None = None) -> None:
    """Write the report to the run directory. With `decode`, chains are shown as decoded tokens, else as messages."""
    source = Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    records = directory.records()
    trained = [record for record in records if record.metrics]
    measured = {phase for record in records for phase in record.seconds}
    phases = [*(phase for phase in PHASES if phase in measured), *sorted(measured - set(PHASES))]
    seconds = {phase: math.fsum(r.seconds.get(phase, 0.0) for r in records) for phase in phases}
    total = sum(seconds.values())

    buffer = io.StringIO()
    try:
        draw_curve(records).savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        curve = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    except ConfigError as error:  # matplotlib is not installed
        curve = str(escape(str(error)))

    # Name and value of each metric in the first and in the last steps.
    figures = []
    for label, metric, spec in ALL_FIGURES:
        values = [v for v in (r.metrics.get(metric, math.nan) for r in trained) if math.isfinite(v)]
        if values:
            count = min(MAX_STEPS, max(len(values) // 2, 1))
            first, last = (format_number(sum(part) / count, spec) for part in (values[:count], values[-count:]))
            figures.append((label, first, last))

    # The chains that alarms name, as far as they were stored.
    named = dict.fromkeys((alarm.step, chain) for alarm in directory.alarms() for chain in alarm.chains)
    keys = list(named)[:MAX_CHAINS]
    stored = {
        (step, chain.trajectory.id): chain.trajectory
        for step in {step for step, _ in keys}
        for chain in directory.trajectories(step)
        if (step, chain.trajectory.id) in named
    }
    budget = _ImageBudget()
    pairs = list(_pairs(directory, [r.step for r in records if r.eval is not None], decode, budget))
    chains = [_show_chain(stored[key], key[0], decode, budget) for key in keys if key in stored]

    text = page.render(
        name=directory.name,
        config=json.dumps(directory.config, indent=2, ensure_ascii=False),
        steps=trained[-1].step if trained else 0,
        asked=records[-1].steps if records else int(directory.config.get("steps") or 0),
        chains=int(math.fsum(r.metrics.get("chains", 0.0) for r in trained)),
        took=format_duration(total),
        shares=[(phase, spent / total, format_duration(spent)) for phase, spent in seconds.items() if total > 0],
        curve=curve,
        figures=figures,
        evals=[(record.step, record.eval) for record in records if record.eval is not None],
        alarms=directory.alarms(),
        alarmed=chains,
        anchor=anchor,
        anchors={chain.anchor for chain in chains},
        pairs=pairs,
        authors={author.value: color for author, color in AUTHOR_COLORS.items()},
        isnan=math.isnan,
    )
    write_atomic(directory.report, sanitize(text).encode("utf-8", "backslashreplace"))


def _pairs(
    directory: RunDirectory, steps: Sequence[int], decode: Decode | None, budget: _ImageBudget
) -> Iterator[tuple[str, ReportChain, ReportChain]]:
    """The same held-out tasks before and after training: the most improved, and last the least improved."""
    if len(steps) < 2:
        return
    before, after = (
        {chain.trajectory.id: chain for chain in directory.trajectories(step, held_out=True)}
        for step in (steps[0], steps[-1])
    )
    same = [name for name in before if name in after and before[name].trajectory.task == after[name].trajectory.task]
    one_per_task = list({before[name].trajectory.group: name for name in reversed(same)}.values())
    gains = {
        name: (after[name].trajectory.reward or 0.0) - (before[name].trajectory.reward or 0.0) for name in one_per_task
    }
    ranked = sorted(one_per_task, key=gains.__getitem__, reverse=True)
    for name in ranked if len(ranked) <= MAX_TASKS else [*ranked[: MAX_TASKS - 1], ranked[-1]]:
        first, last = before[name].trajectory, after[name].trajectory
        sides = [_show_chain(chain, step, decode, budget) for chain, step in ((first, steps[0]), (last, steps[-1]))]
        yield first.task.question, sides[0], sides[1]


class _ImageBudget:
    """The images that a report can still hold."""

    def __init__(self) -> None:
        self._left = MAX_IMAGE_BYTES

    def show(self, image: Image) -> str:
        """The thumbnail as a `data:` URI; a label if it is not decodable, or if the report holds too many images."""
        small = make_thumbnail(image)
        if small is None or len(small.url) > self._left:
            return describe_image(image)
        self._left -= len(small.url)
        return small.url


def _show_chain(trajectory: Trajectory, step: int, decode: Decode | None, budget: _ImageBudget) -> ReportChain:
    reward = "" if trajectory.reward is None else f", reward {trajectory.reward:g}"
    turns = "1 turn" if len(trajectory.turns) == 1 else f"{len(trajectory.turns)} turns"
    outcome = f"{trajectory.stop.value.replace('_', ' ')} after {turns}{reward}"
    spans = []
    for author, style, text, images in trajectory.parts(decode):
        shortened = _PLACEHOLDERS.sub(lambda run: f"{run[1]} × {len(run[0]) // len(run[1])}", text)
        if author is Author.TASK and len(shortened) > MAX_PROMPT:  # the question is at the end of a prompt
            shortened = f"({len(shortened) - MAX_PROMPT} characters) …{shortened[-MAX_PROMPT:]}"
        elif len(shortened) > MAX_TEXT:
            shortened = f"{shortened[:MAX_TEXT]}… ({len(shortened) - MAX_TEXT} characters)"
        spans.append((style, author.value if author else "", shortened, [budget.show(image) for image in images]))
    name = f"step {step}, chain {trajectory.id}: {outcome}"
    return ReportChain(name, anchor(step, trajectory.id), spans)


def anchor(step: int, chain: str) -> str:
    """The HTML id of a chain."""
    return f"chain-{step}-{chain}"


def write_curve(directory: RunDirectory) -> None:
    """Write the reward curve to the run directory."""
    buffer = io.BytesIO()
    draw_curve(directory.records(), directory.name).savefig(buffer, dpi=160)
    write_atomic(directory.curve, buffer.getvalue())


def draw_curve(records: Sequence[StepRecord], title: str = "") -> Figure:
    """Draw the reward of every step, its smoothed curve, and evaluations with confidence intervals.

    Uses no global matplotlib state and opens no window.
    """
    with require_extra("the reward curve", "train"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    points = [(r.step, r.metrics.get("reward/mean", math.nan)) for r in records]
    points = [(step, reward) for step, reward in points if math.isfinite(reward)]
    if points:
        steps, rewards = zip(*points, strict=True)
        axes.plot(steps, rewards, color=TRAIN, alpha=0.25, linewidth=1, marker="." if len(steps) < 3 else None)
        axes.plot(steps, smooth(rewards), color=TRAIN, linewidth=2, label="training tasks")
    evals = [(r.step, r.eval) for r in records if r.eval is not None and math.isfinite(r.eval.reward)]
    if evals:
        bounds = [
            (max(figures.reward - figures.low, 0.0), max(figures.high - figures.reward, 0.0)) for _, figures in evals
        ]
        errors: Any = [[0.0 if math.isnan(half) else half for half in side] for side in zip(*bounds, strict=True)]
        style: dict[str, Any] = {"color": HELD_OUT, "capsize": 3, "linewidth": 1.5, "fmt": "-o", "markersize": 5}
        x = [step for step, _ in evals]
        y = [figures.reward for _, figures in evals]
        axes.errorbar(x, y, errors, label="held-out tasks, sampled, 95 % interval", **style)
        greedy = [(step, figures.metrics["greedy"]) for step, figures in evals if "greedy" in figures.metrics]
        if greedy:
            at, rewards = zip(*greedy, strict=True)
            axes.plot(at, rewards, color=HELD_OUT, linestyle="--", marker="s", markersize=4, label="greedy")
    # Matplotlib would render text between dollar signs as a formula.
    title = sanitize(title).encode("utf-8", "replace").decode()  # it refuses lone surrogates
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


def smooth(values: Sequence[float]) -> list[float]:
    """Centered moving average over about 5 % of the values."""
    half = max(len(values) // 40, 1)
    around = (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in around]
