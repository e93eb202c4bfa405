"""Figures for TensorBoard, in the run's folder: `tensorboard --logdir RUN/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentfly.runs.directory import RunDirectory
from agentfly.runs.record import Progress, StepRecord

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter


class TensorBoardSink:
    """Every figure as a scalar under its name, and every alarm as text."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        from tensorboardX import SummaryWriter  # imports torch where there is one

        done = [record.step for record in self._directory.records()]
        # What an earlier process wrote past the step that is resumed from is to be hidden.
        purge = done[-1] + 1 if done else None
        self._writer = SummaryWriter(str(self._directory.path / "tensorboard"), purge_step=purge, flush_secs=10)

    def progress(self, progress: Progress) -> None:
        """Nothing: TensorBoard knows steps only."""

    def step(self, record: StepRecord) -> None:
        if self._writer is None:
            return
        for name, value in record.flat().items():
            self._writer.add_scalar(name, value, record.step)
        for alarm in record.alarms:
            chains = f" (chains {', '.join(alarm.chains)})" if alarm.chains else ""
            self._writer.add_text(f"alarm/{alarm.kind}", alarm.message + chains, record.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
