"""Progress of a long command: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class ProgressSteps:
    """Context manager that shows the progress of `total` steps: a bar in a terminal, otherwise a line per tenth."""

    def __init__(self, console: Console, title: str, total: int) -> None:
        self._console = console
        self._title = title
        self._total = total
        self.done = 0
        """Steps counted so far."""
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task(title, total=total, note="")

    def __enter__(self) -> ProgressSteps:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str) -> None:
        """Count one more step; `note` is shown next to it."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=note)
        elif self.done * 10 // self._total > (self.done - 1) * 10 // self._total:
            self._console.print(f"{self._title}: {self.done} of {self._total}, {note}", highlight=False, markup=False)
