"""Writes the run directory of a local run from verl's trainer, and keeps what the driver shows."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Mapping, Sequence

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from agentfly.errors import ConfigError
from agentfly.integrations.verl.config import JobSpec, list_checkpoints
from agentfly.integrations.verl.rows import RowAdvantages
from agentfly.runs import Alarm, AlarmMonitor, EvalFigures, Progress, RunWriter, StepRecord, chain_metrics
from agentfly.segment import Floats
from agentfly.training.collector import RolloutBatch
from agentfly.trajectory import Trajectory

LOCK_SECONDS = 60
"""Limit for the end of the process that wrote the run before: Ray may take a moment to end one of a killed driver."""


class RunRecorder:
    """The run directory of a start of the job; the driver has created it."""

    def __init__(self, spec: JobSpec, from_step: int | None = None) -> None:
        """Open the run as it is, to continue it after `from_step`, else after the newest checkpoint."""
        self._checkpoints = spec.folder / "checkpoints"
        steps = list_checkpoints(self._checkpoints)
        if from_step is not None and from_step not in steps:
            raise ConfigError(f"there is no checkpoint of step {from_step}; there are {steps or 'none'}")
        self.start = from_step if from_step is not None else max(steps, default=None)
        """The step whose checkpoint training continues from; None: from the beginning."""
        locked = retry_if_exception_type(ConfigError)
        retrying = Retrying(retry=locked, stop=stop_after_delay(LOCK_SECONDS), wait=wait_fixed(0.5), reraise=True)
        self._writer = retrying(RunWriter.open, spec.folder)
        self._settings = spec.settings
        self._alarms = AlarmMonitor()
        self._new_records: deque[StepRecord] = deque()
        """Steps that the driver has not shown yet; another thread takes them."""
        self._progress: Progress | None = None

    def rewind(self) -> None:
        """Remove what is later than the step that training continues from, and incomplete checkpoints.

        Called once everything is loaded: a start that fails must not remove what is after its step.
        """
        start = -1 if self.start is None else self.start
        self._writer.truncate_after(start)
        self._writer.update_config(self._settings)
        kept = {f"global_step_{step}" for step in list_checkpoints(self._checkpoints) if step <= start}
        for folder in self._checkpoints.glob("global_step_*"):
            if folder.name not in kept:
                shutil.rmtree(folder)
        for record in self._writer.records():
            self._alarms.observe(record.step, record.metrics, evaluation=record.eval)
        self._progress = Progress("start")

    def report_progress(self, progress: Progress) -> None:
        """Set what `poll` returns as the progress of the step that runs."""
        self._progress = progress

    def poll(self) -> tuple[list[StepRecord], Progress | None]:
        """The steps written since the last call, and the progress of the one that runs; None until `rewind`."""
        records = [self._new_records.popleft() for _ in range(len(self._new_records))]
        return records, self._progress

    def write_step(
        self,
        step: int,
        batch: RolloutBatch,
        computed: RowAdvantages | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        seconds: Mapping[str, float] | None = None,
        evaluation: tuple[Sequence[Trajectory], EvalFigures] | None = None,
        tools: Sequence[str] = (),
    ) -> None:
        """Write the chains of a step with their advantages, its metrics, and the evaluation after it.

        computed: None in a step that trains nothing. tools: names of the agent's tools, for alarms.
        """
        advantages: dict[str, list[Floats]] = {}  # by chain, one array per segment that was trained
        for sample in computed.samples if computed else ():
            advantages.setdefault(sample.name.partition("#")[0], []).append(sample.advantages)
        chains = batch.trajectories
        failed = self._writer.write_trajectories(step, chains, advantages) if chains else []
        if computed:
            self._writer.write_learner_logprobs(step, computed.learner_logprobs)
        if evaluation:
            failed += self._writer.write_trajectories(step, evaluation[0], held_out=True)
        figures: dict[str, float] = {}
        alarms: tuple[Alarm, ...] = ()
        if chains:
            figures = {**chain_metrics(chains, version=step - 1), **batch.selection.metrics, **(metrics or {})}
            alarms = self._alarms.observe(step, figures, chains, tools, evaluation[1] if evaluation else None)
        if failed:
            alarms += (Alarm("unwritten", f"{len(failed)} chains cannot be written: {failed[0]}", step=step),)
        record = StepRecord(
            step,
            self._settings.get("steps", 0),
            figures,
            seconds or {},
            eval=evaluation[1] if evaluation else None,
            leased=batch.leased,
            waiting=batch.waiting,
            alarms=alarms,
        )
        self._writer.append(record)
        self._new_records.append(record)

    def close(self) -> None:
        """Release the run directory."""
        self._writer.close()
