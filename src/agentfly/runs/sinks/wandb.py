"""Figures for Weights & Biases. `WANDB_MODE=offline` keeps them in the run's folder, for `wandb sync` later."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentfly.errors import ConfigError, describe
from agentfly.runs.directory import RunDirectory
from agentfly.runs.files import replace
from agentfly.runs.record import Progress, StepRecord

if TYPE_CHECKING:
    import wandb


class WandbSink:
    """One W&B run for a run's folder, however often it is resumed."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._run: wandb.Run | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        import wandb

        path = self._directory.path
        kept = path / "wandb.id"
        name = kept.read_text() if kept.is_file() else uuid.uuid4().hex[:8]
        replace(kept, name.encode())
        settings = wandb.Settings(console="off", silent=True)
        try:
            self._run = wandb.init(
                project="agentfly",
                name=path.resolve().name,
                id=name,
                resume="allow",
                dir=str(path),
                config=dict(config),
                settings=settings,
            )
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases could not be started ({describe(error)}); `wandb login` first, or set "
                "WANDB_MODE=offline, or leave 'wandb' out of the sinks"
            ) from error
        # Its own counter only goes up, and a run that is resumed goes back to its checkpoint.
        self._run.define_metric("*", step_metric="step")

    def progress(self, progress: Progress) -> None:
        """Nothing: figures are sent a step."""

    def step(self, record: StepRecord) -> None:
        if self._run is not None:
            alarms = {f"alarm/{alarm.kind}": 1 for alarm in record.alarms}
            self._run.log({"step": record.step, **record.flat(), **alarms})

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
