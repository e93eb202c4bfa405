"""A run in the terminal: a live panel where there is one, a line a step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from agentfly.runs.directory import RunDirectory
from agentfly.runs.record import Progress, StepRecord
from agentfly.runs.sinks.panel import Scene
from agentfly.runs.words import beside, duration, figures, sanitize

PACE = 20
"""Steps whose mean time says how long the rest will take."""


class ConsoleSink:
    """Shows a run to whoever sits at the terminal, or reads the log of it."""

    def __init__(self, directory: RunDirectory, console: Console | None = None) -> None:
        self._directory = directory
        self._console = console or Console()
        self._drawn = self._console.is_terminal and not self._console.is_dumb_terminal
        self._records: list[StepRecord] = []
        self._progress: Progress | None = None
        self._title, self._steps = "", 0
        self._before = 0.0
        """Seconds that the run took before it was resumed."""
        self._begun = time.monotonic()
        self._ended: deque[float] = deque([self._begun], PACE + 1)
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._scene)

    def start(self, config: Mapping[str, Any]) -> None:
        self._records = self._directory.records()
        self._before = sum(sum(record.seconds.values()) for record in self._records)
        self._title, self._steps = _title(config, self._directory.path), int(config.get("steps") or 0)
        self._begun = time.monotonic()
        self._ended = deque([self._begun], PACE + 1)
        if self._drawn:
            self._live.start()
        else:
            self._say(Text(sanitize(f"{self._title} · {self._steps} steps")))

    def progress(self, progress: Progress) -> None:
        self._progress = progress

    def step(self, record: StepRecord) -> None:
        self._progress, self._steps = None, record.steps
        self._records = [*self._records, record]  # another thread may be drawing the list
        if record.metrics:
            self._ended.append(time.monotonic())
        if not self._drawn:
            for line in self._lines(record):
                self._say(Text(sanitize(line)))

    def close(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def _left(self) -> float | None:
        if len(self._ended) < 2:
            return None
        pace = (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)
        return max((self._steps - self._records[-1].step) * pace - (time.monotonic() - self._ended[-1]), 0.0)

    def _scene(self) -> Scene:
        elapsed = self._before + time.monotonic() - self._begun
        done = bool(self._records) and self._records[-1].step >= self._steps
        left = None if done else self._left()
        return Scene(self._title, self._records, self._steps, elapsed, left, self._progress)

    def _lines(self, record: StepRecord) -> list[str]:
        lines = []
        if record.metrics:
            parts = [f"step {record.step:>{len(str(record.steps))}}/{record.steps}"]
            if "reward/mean" in record.metrics:
                parts.append(f"reward {record.metrics['reward/mean']:.3f}")
            parts += [f"{word} {shown}" for word, shown in figures(record)]
            parts += [f"{sum(record.seconds.values()):.3g} s"] if record.seconds else []
            left = self._left()
            parts += [f"{duration(left)} left"] if left else []
            lines.append("  ".join(parts))
        if record.eval is not None:
            held, when = record.eval, f"after step {record.step}" if record.step else "before training"
            sure = f"({held.low:.3f} to {held.high:.3f}, {held.tasks} tasks)"
            lines.append(f"held out {when}: reward {held.reward:.3f} {sure}{beside(held)}")
        alarms = (f"ALARM {a.kind}: {a.message} [chains {', '.join(a.chains) or 'none'}]" for a in record.alarms)
        return [*lines, *alarms]

    def _say(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


def _title(config: Mapping[str, Any], path: Path) -> str:
    words = [config.get("recipe"), config.get("model"), config.get("algorithm")]
    named = [each.get("name") if isinstance(each, Mapping) else each for each in words]
    return " · ".join(["agentfly", *(Path(str(each)).name for each in named if each), path.name])
