"""The actor that owns the run directory: workers send finished groups to it, the trainer metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from agentfly.errors import ConfigError
from agentfly.runs import Alarm, AlarmMonitor, EvalFigures, Progress, RunDirectory, RunWriter, StepRecord, chain_metrics
from agentfly.segment import Floats
from agentfly.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """A group to run."""

    uid: str
    """verl's id of the group."""
    position: int
    """Position of its task in the stream of tasks."""
    step: int
    """The training step that asked for it."""


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """The chains of a group, as a worker sends them to the recorder."""

    request: GroupRequest
    chains: tuple[Trajectory, ...]
    greedy: Trajectory | None = None
    """The greedy chain of the task, where the algorithm needs one; it is not trained."""
    leased: int = 0
    """Environments leased by chains of all workers when it ended."""
    waiting: int = 0
    tools: tuple[str, ...] = ()
    """Names of the agent's tools."""


class RunRecorder:
    """Writes a run directory like that of a local run; a Ray actor on the machine of the driver."""

    def __init__(self, path: Path, config: Mapping[str, Any], recipe: Path | None, *, steps: int) -> None:
        """Create the run if the folder has none; `restart` continues it."""
        self._steps = steps
        self._groups: dict[str, FinishedGroup] = {}
        """Finished groups by verl's id, until they are trained."""
        self._alarms = AlarmMonitor()
        self._new_records: list[StepRecord] = []
        """Steps that the driver has not shown yet."""
        self._progress = Progress("start")
        self._tools: tuple[str, ...] = ()
        if (path / "config.json").is_file():
            newest = max((record.step for record in RunDirectory(path).records()), default=-1)
            # Ray may take a moment to end the recorder of a driver that was killed.
            for attempt in Retrying(
                retry=retry_if_exception_type(ConfigError),
                stop=stop_after_delay(30),
                wait=wait_fixed(0.5),
                reraise=True,
            ):
                with attempt:
                    self._writer = RunWriter.resume(path, newest)
            self._writer.update_config(config)
        else:
            self._writer = RunWriter.create(path, config, recipe)

    def restart(self, step: int) -> None:
        """Drop everything after `step`: training continues from its checkpoint."""
        self._writer.truncate_after(step)
        self._groups.clear()
        self._new_records.clear()
        self._alarms = AlarmMonitor()
        for record in self._writer.records():
            self._alarms.observe(record.step, record.metrics)

    def add_group(self, group: FinishedGroup) -> None:
        """Keep a finished group until it is trained; one that was run again replaces the first."""
        self._groups[group.request.uid] = group
        self._tools = group.tools
        self._progress = Progress("generate", len(self._groups), 0, group.leased, group.waiting)

    def take_groups(self, uids: Sequence[str], oldest: int = 0) -> list[FinishedGroup]:
        """Remove and return the groups of a step, by position; groups started before the step `oldest` are dropped."""
        taken = sorted((self._groups.pop(uid) for uid in uids), key=lambda each: each.request.position)
        self._groups = {uid: each for uid, each in self._groups.items() if each.request.step >= oldest}
        return taken

    def report_progress(self, progress: Progress) -> None:
        self._progress = progress

    def write_step(
        self,
        step: int,
        chains: Sequence[Trajectory],
        advantages: Mapping[str, Sequence[Floats]],
        *,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        learner_logprobs: Mapping[str, Floats],
        evaluation: tuple[Sequence[Trajectory], EvalFigures] | None,
        pools: tuple[int, int] = (0, 0),
    ) -> None:
        """Write the chains of a step with their advantages, its metrics, and the evaluation after it.

        advantages: one array per segment that was trained, by chain id. learner_logprobs: of its sampled tokens, by
        GROUP/CHAIN#SEGMENT. pools: environments leased, chains waiting.
        """
        evaluated = () if evaluation is None else evaluation[0]
        unwritten = []
        for held_out, written in ((False, chains), (True, evaluated)):
            if written:
                arrays = {} if held_out else advantages
                failed = self._writer.write_trajectories(step, written, arrays, held_out=held_out)
                if failed:
                    message = f"{len(failed)} chains cannot be written: {failed[0]}"
                    unwritten.append(Alarm("unwritten", message, step=step))
        self._writer.write_learner_logprobs(step, learner_logprobs)
        figures = {**chain_metrics(chains, version=step - 1), **metrics} if chains else {}
        alarms = self._alarms.observe(step, figures, chains, self._tools) if chains else ()
        record = StepRecord(
            step,
            self._steps,
            figures,
            seconds,
            eval=None if evaluation is None else evaluation[1],
            leased=pools[0],
            waiting=pools[1],
            alarms=(*alarms, *unwritten),
        )
        self._writer.append(record)
        self._new_records.append(record)

    def poll(self) -> tuple[list[StepRecord], Progress]:
        """The steps written since the last call, and the progress of the one that runs."""
        records, self._new_records = self._new_records, []
        return records, self._progress

    def close(self) -> None:
        self._writer.close()
