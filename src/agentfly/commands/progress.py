"""How far a command is: a bar in a terminal, a line for every tenth elsewhere."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Steps:
    """A number of steps that are taken one by one; use it with `with`."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total, self._done = console, what, total, 0
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task(what, total=total, said="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, said: str) -> None:
        """One more is done; `said` goes beside it."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, said=said)
        elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            self._console.print(f"{self._what}: {self._done} of {self._total}, {said}", highlight=False, markup=False)
