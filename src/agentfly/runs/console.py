"""Console logger: a live panel in a terminal, one line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentfly.errors import sanitize
from agentfly.runs.directory import RunDirectory, recipe_name
from agentfly.runs.record import (
    PHASES,
    EvalFigures,
    Progress,
    StepRecord,
    figures,
    format_duration,
    format_eval_details,
)

ECHO_WIDTH = 2
"""Columns that a live panel leaves free at the right, where a terminal echoes Ctrl-C as `^C`. If that wrapped to the
next line, the panel would be redrawn one line too low, and its old border would stay."""
ETA_STEPS = 20
"""Number of recent steps whose mean duration gives the remaining time."""
BLOCKS = "▁▂▃▄▅▆▇█"
COLORS = {
    "generate": "green",
    "tools": "yellow",
    "update": "bright_blue",
    "waiting": "red",
    "publish": "magenta",
    "evaluate": "cyan",
    "save": "bright_white",
    "other": "bright_black",
}
"""The color of each phase; those of the model and the tools match their text."""
PROGRESS_INTERVAL = 60.0
"""Seconds between lines that report progress within a phase, outside a terminal."""
CELL_WIDTH = 19
"""Width of a metric in columns."""
MAX_ALARMS = 3
"""Number of latest alarms shown."""


class ConsoleLogger:
    """Shows a run in a terminal or as log lines."""

    def __init__(self, directory: RunDirectory, console: Console | None = None) -> None:
        self._directory = directory
        self._console = console or Console()
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._records: list[StepRecord] = []
        self._progress: Progress | None = None
        self._printed = 0.0
        """When progress was last printed as a line."""
        self._title = ""
        self._steps = 0
        self._previous_seconds = 0.0
        """Duration of the run before it was resumed."""
        self._started = time.monotonic()
        self._step_ends: deque[float] = deque([self._started], ETA_STEPS + 1)
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._panel)

    def start(self, config: Mapping[str, Any]) -> None:
        self._records = self._directory.records()
        self._previous_seconds = sum(sum(record.seconds.values()) for record in self._records)
        algorithm = config.get("algorithm")
        parts = [
            recipe_name(config.get("recipe") or ""),
            Path(str(config.get("model") or "")).name,
            str((algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm) or ""),
        ]
        self._title = " · ".join(["agentfly", *filter(None, parts), self._directory.path.name])
        self._steps = int(config.get("steps") or 0)
        self._started = time.monotonic()
        self._step_ends = deque([self._started], ETA_STEPS + 1)
        if self._is_live:
            self._live.start()
        else:
            self._print(Text(sanitize(f"{self._title} · {self._steps} {'step' if self._steps == 1 else 'steps'}")))

    def progress(self, progress: Progress) -> None:
        before = None if self._progress is None else self._progress.phase
        self._progress = progress
        if self._is_live:
            return
        now = time.monotonic()
        if progress.phase != before:
            self._printed = now
            if not self._records:
                self._print(Text(f"{progress.phase} …"))  # the first step may take minutes
        elif progress.done and now - self._printed >= PROGRESS_INTERVAL:
            self._printed = now
            total = f" of {progress.total}" if progress.total else ""
            self._print(Text(f"{progress.phase}: {progress.done}{total} chains"))

    def step(self, record: StepRecord) -> None:
        self._progress = None
        self._steps = record.steps
        self._records = [*self._records, record]  # another thread may be rendering the list
        if record.metrics:
            self._step_ends.append(time.monotonic())
        if not self._is_live:
            for line in self._lines(record):
                self._print(Text(sanitize(line)))

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def _remaining_seconds(self) -> float | None:
        if len(self._step_ends) < 2:
            return None
        pace = (self._step_ends[-1] - self._step_ends[0]) / (len(self._step_ends) - 1)
        return max((self._steps - self._records[-1].step) * pace - (time.monotonic() - self._step_ends[-1]), 0.0)

    def _panel(self) -> Constrain:
        elapsed = self._previous_seconds + time.monotonic() - self._started
        done = bool(self._records) and self._records[-1].step >= self._steps
        left = None if done else self._remaining_seconds()
        panel = RunPanel(self._title, self._records, self._steps, elapsed, left, self._progress)
        return Constrain(panel, max(self._console.width - ECHO_WIDTH, 1))

    def _lines(self, record: StepRecord) -> list[str]:
        lines = []
        if record.metrics:
            parts = [f"step {record.step:>{len(str(record.steps))}}/{record.steps}"]
            if "reward/mean" in record.metrics:
                parts.append(f"reward {record.metrics['reward/mean']:.3f}")
            parts += [f"{label} {value}" for label, value in figures(record)]
            parts += [f"{sum(record.seconds.values()):.3g} s"] if record.seconds else []
            left = self._remaining_seconds()
            parts += [f"{format_duration(left)} left"] if left else []
            lines.append("  ".join(parts))
        if record.eval is not None:
            held_out = record.eval
            when = f"after step {record.step}" if record.step else "before training"
            interval = f"({held_out.low:.3f} to {held_out.high:.3f}, {held_out.tasks} tasks)"
            details = format_eval_details(held_out)
            lines.append(f"held out {when}: reward {held_out.reward:.3f} {interval}{details}")
        alarms = (
            f"ALARM {a.kind}: {a.message} [chains {', '.join(a.chains) or 'none'}]" if a.is_warning else a.message
            for a in record.alarms
        )
        return [*lines, *alarms]

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


@dataclass(frozen=True, slots=True)
class RunPanel:
    """The state of a run as one compact panel."""

    title: str
    records: Sequence[StepRecord]
    """All steps so far, including the evaluation before training."""
    steps: int
    elapsed: float
    left: float | None
    """Remaining seconds; None if unknown."""
    progress: Progress | None = None
    """Progress of the current step; None between steps."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        trained = [record for record in self.records if record.metrics]

        # The current step, a progress bar and the remaining time.
        done = trained[-1].step if trained else 0
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(max(self.steps, 1), done, complete_style="bright_blue", finished_style="green")
        times = Text(format_duration(self.elapsed), "dim")
        if self.left is not None:
            times.append(", ").append(f"{format_duration(self.left)} left", "bold not dim")
        grid.add_row(Text.assemble(("step ", "dim"), (f"{done}/{self.steps}", "bold")), bar, times)

        parts: list[RenderableType] = [grid]
        if trained:
            parts += [Text(), _reward_rows(self.records, trained, width - 4)]
            parts += [_metric_rows(trained[-1], self.progress, width - 4), _time_rows(trained[-1].seconds, width - 4)]
        elif self.records and self.records[0].eval is not None:
            parts += [Text.assemble(("held out ", "dim"), _interval(self.records[0].eval), (" before training", "dim"))]
        for alarm in [alarm for record in self.records for alarm in record.alarms][-MAX_ALARMS:]:
            if not alarm.is_warning:
                parts.append(Text(f"step {alarm.step}: {alarm.message}", "green"))
                continue
            kind = (f"▲ step {alarm.step} {alarm.kind.replace('_', ' ')}: ", "bold yellow")
            chains = (f" [{', '.join(alarm.chains)}]" * bool(alarm.chains), "dim")
            parts.append(Text.assemble(kind, (sanitize(alarm.message), "yellow"), chains))
        subtitle = None
        if self.progress is not None:
            count = f" {self.progress.done}/{self.progress.total}" if self.progress.total else ""
            subtitle = Text(f"{self.progress.phase}{count}", COLORS.get(self.progress.phase, "dim"))
        yield Panel(Group(*parts), title=Text(self.title, "bold"), title_align="left", border_style="bright_blue",
                    subtitle=subtitle, subtitle_align="right", width=width)  # fmt: skip


def _reward_rows(records: Sequence[StepRecord], trained: Sequence[StepRecord], width: int) -> Group:
    values = (record.metrics.get("reward/mean", math.nan) for record in trained)
    series = [value for value in values if math.isfinite(value)]
    if not series:
        return Group(Text("no reward", "dim"))
    line = Text.assemble(("reward ", "dim"), (f"{series[-1]:.3g}", "bold green"))
    # Recent change: the mean of the last steps, at most ten, minus that of as many steps before.
    half = min(20, len(series)) // 2
    if half >= 2:
        change = sum(series[-half:]) / half - sum(series[-2 * half : -half]) / half
        arrow, style = ("↗", "green") if change > 0.005 else ("↘", "red") if change < -0.005 else ("→", "dim")
        line.append(f" {arrow} {change:+.2f}", style)
    line.append("  best ", "dim").append(f"{max(series):.3g}")
    evals = [record.eval for record in records if record.eval is not None]
    if evals:
        line.append("   held out ", "dim")
        line.append(f"{evals[0].reward:.3g} → " if len(evals) > 1 else "").append_text(_interval(evals[-1]))
    return Group(line, Text(sparkline(series, width), "green", no_wrap=True, overflow="crop"))


def _interval(figures: EvalFigures) -> Text:
    has_bounds = math.isfinite(figures.low)
    bounds = f" ({figures.low:.2f}–{figures.high:.2f})" if has_bounds else ""
    return Text.assemble((f"{figures.reward:.3g}", "bold"), (bounds + format_eval_details(figures), "dim"))


def _metric_rows(record: StepRecord, progress: Progress | None, width: int) -> Table:
    cells = [Text.assemble((f"{label} ", "dim"), value) for label, value in figures(record)]
    leased, waiting = (record.leased, record.waiting) if progress is None else (progress.leased, progress.waiting)
    cells.append(Text.assemble(("leased/waiting ", "dim"), f"{leased}/", (f"{waiting}", "yellow" if waiting else "")))
    across = max(width // CELL_WIDTH, 1)
    grid = Table.grid(expand=True)
    for _ in range(across):
        grid.add_column(ratio=1, no_wrap=True)
    for start in range(0, len(cells), across):
        grid.add_row(*cells[start : start + across])
    return grid


def _time_rows(seconds: Mapping[str, float], width: int) -> Group:
    """A bar with the fraction of time of each phase of a step, and a legend."""
    total = sum(seconds.values())
    if not total > 0:
        return Group()
    bar = Text(no_wrap=True, overflow="crop")
    legend = Text.assemble((f"{total:.3g} s/step", "dim"))
    at = 0.0
    for phase in (*PHASES, *(seconds.keys() - set(PHASES))):
        share = seconds.get(phase, 0.0) / total
        color = COLORS.get(phase, "white")
        bar.append("━" * (round((at + share) * width) - round(at * width)), color)
        at += share
        if share >= 0.005:
            legend.append(" ■ ", color).append(f"{phase} ", "dim").append(f"{share:.0%}")
    return Group(bar, legend)


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of block characters. With more values than columns, each column is a mean."""
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[int((mean - low) / span * 7.999)] if span > 0 else BLOCKS[3] for mean in means)
