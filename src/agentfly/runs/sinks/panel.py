"""How a run looks in a terminal: one compact panel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentfly.runs.record import PHASES, Alarm, EvalFigures, Progress, StepRecord
from agentfly.runs.words import beside, duration, figures, sanitize

BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = {
    "generate": "green",
    "tools": "yellow",
    "update": "bright_blue",
    "waiting": "red",
    "publish": "magenta",
    "evaluate": "cyan",
    "save": "bright_white",
    "other": "bright_black",
}
"""One colour a phase; the model's and the tools' are those of their words."""
CELL = 19
"""Columns that a figure takes."""
ALARMS = 3
"""Most alarms shown, the latest."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything a panel shows."""

    title: str
    records: Sequence[StepRecord]
    """Of all steps so far, evaluations before training too."""
    steps: int
    elapsed: float
    left: float | None
    """Seconds to the end; None while nobody can say."""
    progress: Progress | None = None
    """How far the step at hand is; None between steps."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        trained = [record for record in self.records if record.metrics]
        parts: list[RenderableType] = [self._advance(trained)]
        if trained:
            parts += [
                Text(),
                _reward(self.records, trained, width - 4),
                _figures(trained[-1], self.progress, width - 4),
            ]
            parts += [_time(trained[-1].seconds, width - 4)]
        elif self.records and self.records[0].eval is not None:
            parts += [Text.assemble(("held out ", "dim"), _interval(self.records[0].eval), (" before training", "dim"))]
        parts += _alarms([alarm for record in self.records for alarm in record.alarms])
        yield Panel(Group(*parts), title=Text(self.title, "bold"), title_align="left", border_style="bright_blue",
                    subtitle=_doing(self.progress), subtitle_align="right", width=width)  # fmt: skip

    def _advance(self, trained: Sequence[StepRecord]) -> Table:
        done = trained[-1].step if trained else 0
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(max(self.steps, 1), done, complete_style="bright_blue", finished_style="green")
        times = Text(duration(self.elapsed), "dim")
        if self.left is not None:
            times.append(", ").append(f"{duration(self.left)} left", "bold not dim")
        grid.add_row(Text.assemble(("step ", "dim"), (f"{done}/{self.steps}", "bold")), bar, times)
        return grid


def _reward(records: Sequence[StepRecord], trained: Sequence[StepRecord], width: int) -> Group:
    series = rewards(trained)
    if not series:
        return Group(Text("no reward", "dim"))
    line = Text.assemble(("reward ", "dim"), (f"{series[-1]:.3g}", "bold green"))
    line.append_text(_change(series))
    line.append("  best ", "dim").append(f"{max(series):.3g}")
    evals = [record.eval for record in records if record.eval is not None]
    if evals:
        line.append("   held out ", "dim")
        line.append(f"{evals[0].reward:.3g} → " if len(evals) > 1 else "").append_text(_interval(evals[-1]))
    return Group(line, Text(sparkline(series, width), "green", no_wrap=True, overflow="crop"))


def _change(series: Sequence[float], over: int = 20) -> Text:
    """How the reward moved lately: the mean of the last steps against that of as many before."""
    half = min(over, len(series)) // 2
    if half < 2:
        return Text()
    change = sum(series[-half:]) / half - sum(series[-2 * half : -half]) / half
    arrow, style = ("↗", "green") if change > 0.005 else ("↘", "red") if change < -0.005 else ("→", "dim")
    return Text(f" {arrow} {change:+.2f}", style)


def _interval(figures: EvalFigures) -> Text:
    known = math.isfinite(figures.low)
    bounds = f" ({figures.low:.2f}–{figures.high:.2f})" if known else ""
    return Text.assemble((f"{figures.reward:.3g}", "bold"), (bounds + beside(figures), "dim"))


def _figures(record: StepRecord, progress: Progress | None, width: int) -> Table:
    cells = [Text.assemble((f"{word} ", "dim"), shown) for word, shown in figures(record)]
    lent, waiting = (record.lent, record.waiting) if progress is None else (progress.lent, progress.waiting)
    cells.append(Text.assemble(("lent/waiting ", "dim"), f"{lent}/", (f"{waiting}", "yellow" if waiting else "")))
    across = max(width // CELL, 1)
    grid = Table.grid(expand=True)
    for _ in range(across):
        grid.add_column(ratio=1, no_wrap=True)
    for start in range(0, len(cells), across):
        grid.add_row(*cells[start : start + across])
    return grid


def _time(seconds: Mapping[str, float], width: int) -> Group:
    """A bar whose stretches are the shares of a step's phases, and their names under it."""
    total = sum(seconds.values())
    if not total > 0:
        return Group()
    bar, words = Text(no_wrap=True, overflow="crop"), Text.assemble((f"{total:.3g} s/step", "dim"))
    at = 0.0
    for phase in (*PHASES, *(seconds.keys() - set(PHASES))):
        share = seconds.get(phase, 0.0) / total
        colour = COLOURS.get(phase, "white")
        bar.append("━" * (round((at + share) * width) - round(at * width)), colour)
        at += share
        if share >= 0.005:
            words.append(" ■ ", colour).append(f"{phase} ", "dim").append(f"{share:.0%}")
    return Group(bar, words)


def _alarms(alarms: Sequence[Alarm]) -> Iterable[Text]:
    for alarm in alarms[-ALARMS:]:
        yield Text.assemble(
            (f"▲ step {alarm.step} {alarm.kind.replace('_', ' ')}: ", "bold yellow"),
            (sanitize(alarm.message), "yellow"),
            (f" [{', '.join(alarm.chains)}]" * bool(alarm.chains), "dim"),
        )


def _doing(progress: Progress | None) -> Text | None:
    if progress is None:
        return None
    count = f" {progress.done}/{progress.total}" if progress.total else ""
    return Text(f"{progress.phase}{count}", COLOURS.get(progress.phase, "dim"))


def rewards(records: Iterable[StepRecord]) -> list[float]:
    values = (record.metrics.get("reward/mean", math.nan) for record in records)
    return [value for value in values if math.isfinite(value)]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line. Where there are more values than columns, each column is the mean of its share."""
    if not values or width < 1:
        return ""
    columns = min(width, len(values))
    edges = [round(i * len(values) / columns) for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(BLOCKS[int((mean - low) / span * 7.999)] if span > 0 else BLOCKS[3] for mean in means)
