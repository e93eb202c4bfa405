"""The rollout of asynchronous training: groups run while the learner updates and while weights change.

Version v are the weights after v updates; step n trains version n - 1 and produces version n. A token of version w that
is trained in step n has the age n - 1 - w, which never exceeds `max_staleness`:

- Groups are started at most one step ahead of the learner: with version v, those of step v + 2 at the latest. Trained
  in order, their tokens are at most one update old.
- A step takes the first `tasks_per_step` groups that are complete, oldest first. A slow group is overtaken and carries
  over to a later step.
- As soon as a group contains a token that is too old for the next step, it is cancelled: dropped, or run again.

Finished chains are appended to the run's journal, with the composition of every batch. A resumed run trains the batches
since its checkpoint again from there, which gives the same weights, and continues groups with the chains they lack.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentfly.agent import BaseAgent
from agentfly.algorithms.base import Episode
from agentfly.errors import RecordError
from agentfly.rollout.scheduler import ChainJob, run_chains
from agentfly.runs.files import append_lines, encode_line, read_lines, write_atomic
from agentfly.runs.record import Progress
from agentfly.training.collector import ROUNDS, RolloutBatch, StepCollector
from agentfly.training.config import TrainConfig
from agentfly.training.selection import Selection, select_chains, select_greedy
from agentfly.training.task_sampler import TaskSampler
from agentfly.trajectory import Trajectory
from agentfly.types import Task

STEPS_AHEAD = 1
"""Steps whose groups are started before the learner needs them. One keeps both sides busy; more would only add age."""
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingGroup:
    """A task whose chains run, or have finished and are not trained yet."""

    position: int
    """Position of the task in the task sampler's stream; the number of the group in the run."""
    task: Task
    size: int
    """Number of chains, including the greedy one where the algorithm needs it."""
    attempt: int = 0
    """Number of times its chains were discarded as too old."""
    chains: dict[int, Trajectory] = field(default_factory=dict)
    """Finished chains by their number."""
    versions: set[int] = field(default_factory=set)
    """Weight versions that sampled the finished chains."""
    running: asyncio.Task[None] | None = None
    started: int = 0
    """Weight version when the running chains were started; their tokens are not older."""

    @property
    def complete(self) -> bool:
        return len(self.chains) == self.size

    def add(self, chain: Trajectory) -> None:
        """Add a finished chain, with the task as it was given: JSON may have changed its columns."""
        self.chains[chain.chain] = replace(chain, task=self.task)
        for segment in chain.segments:
            self.versions.update(np.unique(segment.weight_versions[segment.mask]).tolist())

    def age(self, version: int) -> int:
        """Updates between the weights of its oldest token and `version`; of chains that run, at most that many."""
        started = () if self.running is None else (self.started,)
        return version - min((*self.versions, *started), default=version)

    def to_json(self) -> dict[str, Any]:
        """The group with its finished chains. Chains that JSON cannot hold are left out, and run again on a resume."""
        chains = []
        for chain in self.chains.values():
            with suppress(RecordError):  # the trainer raises an alarm for such a chain when it is trained
                chains.append(chain.to_json())
        return {"position": self.position, "attempt": self.attempt, "chains": chains}


class RolloutJournal:
    """Append-only file of what the rollout did since the newest checkpoint, one JSON object per line:

    {"checkpoint": step}                              the first line
    {"group": position, "attempt": number, "chain": trajectory}
    {"group": position, "discard": attempt or null}   it was too old, and runs again as this attempt; null: it does not
    {"step": step, "groups": [position, …]}           the groups that a step took, in order
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, line: Mapping[str, Any]) -> None:
        append_lines(self._path, [line])

    def reset(self, step: int) -> None:
        """Begin again after a checkpoint, which contains everything before it."""
        write_atomic(self._path, encode_line({"checkpoint": step}))

    def load(self, step: int) -> list[dict[str, Any]]:
        """The lines since the checkpoint of `step`; empty, after a reset, if the journal follows another one."""
        lines = read_lines(self._path)
        if not lines or lines[0].get("checkpoint") != step:
            self.reset(step)
            return []
        write_atomic(self._path, b"".join(map(encode_line, lines)))  # without an incomplete last line
        return lines[1:]


def _discard_metric(attempt: int | None) -> str:
    return "dropped_chains" if attempt is None else "recomputed_chains"


class AsyncCollector(StepCollector):
    """Runs groups in the background; `collect` takes those of the next step."""

    def __init__(
        self,
        agent: BaseAgent,
        sampler: TaskSampler,
        config: TrainConfig,
        on_progress: Callable[[Progress], None],
        journal: Path,
    ) -> None:
        super().__init__(agent, sampler, config, on_progress)
        self._journal = RolloutJournal(journal)
        self._size = config.num_chains + config.algorithm.needs_greedy
        self._total = config.tasks_per_step * self._size
        self._groups: dict[int, PendingGroup] = {}
        """Groups that are not taken yet, by position."""
        self._recorded: dict[int, list[PendingGroup]] = {}
        """Batches of steps after the checkpoint that a resumed run trains again."""
        self._version = 0
        self._taken = 0
        """The last step whose batch is complete."""
        self._held = 0
        """Groups taken for the step after it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._counts: Counter[str] = Counter()
        self._repeated_counts: dict[int, Counter[str]] = {}
        """Discarded chains by step, of steps that are repeated after a resume."""
        self._collect_seconds = self._idle_seconds = 0.0
        self._idle_since: float | None = None

    # ── called by the trainer ──

    async def collect(self, step: int) -> RolloutBatch:
        """Wait for the groups of a step: `tasks_per_step`, or that many with variance where others are resampled."""
        start = time.perf_counter()
        config = self.config
        resample = config.zero_variance_rule == "resample"
        trajectories: list[Trajectory] = []
        selection = Selection()
        greedy: dict[int, Episode] | None = {} if config.algorithm.needs_greedy else None
        positions: list[int] = []
        recorded = step in self._recorded
        polling = asyncio.create_task(self._poll_environments())
        try:
            async with aclosing(self._complete_groups(step)) as groups:
                async for group in groups:
                    number = len(positions)  # groups are numbered within the step, as in a synchronous run
                    positions.append(group.position)
                    chains = [replace(group.chains[chain], group=number) for chain in sorted(group.chains)]
                    if greedy is not None:
                        greedy |= select_greedy([chains.pop()], self.config)
                    trajectories += chains
                    selection += select_chains(chains, self.config)
                    self._held = len(selection.groups) if resample else len(positions)
                    if self._held == config.tasks_per_step or len(positions) == ROUNDS * config.tasks_per_step:
                        break
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        # Only a complete batch counts: a resumed run takes the groups of a cancelled step again, from the journal.
        self._taken = step
        self._held = 0
        if not recorded:  # else the journal has the line, and a second one would end the replay of a later resume
            self._journal.append({"step": step, "groups": positions})
        # Count the tokens to train by the updates since the weights that sampled them.
        segments = [segment for group in selection.groups for episode in group for segment in episode.segments]
        ages = [step - 1 - segment.weight_versions[segment.mask] for segment in segments]
        if ages:
            for age, count in enumerate(np.bincount(np.concatenate(ages))):
                self._counts[f"age_{age}"] += int(count)
        self._collect_seconds += (seconds := time.perf_counter() - start)
        return self._build_batch(step, trajectories, selection, greedy, seconds=seconds)

    def advance(self, version: int) -> None:
        """Cancel groups that are too old for the next step, and start those of one more step."""
        self._version = version
        self._counts += self._repeated_counts.pop(version, Counter())
        config = self.config.async_training
        for group in list(self._groups.values()):  # a copy: discarding changes the mapping
            # Version `version` is what the next step trains with, so this is the age that its tokens would have there.
            if group.age(version) <= config.max_staleness:
                continue
            if group.running is not None:
                group.running.cancel()
            attempt = group.attempt + 1 if config.on_stale == "recompute" else None
            self._discard(group, attempt)
            self._journal.append({"group": group.position, "discard": attempt})
            self._counts[_discard_metric(attempt)] += self.config.num_chains
        self._start_groups()

    def pop_metrics(self, seconds: float) -> dict[str, float]:
        """Ages of the trained tokens, discarded chains, and the fraction of `seconds` that each side waited."""
        self._track_idle()
        out = {f"staleness/age_{age}": 0.0 for age in range(self.config.async_training.max_staleness + 1)}
        out |= {f"staleness/{name}": 0.0 for name in ("dropped_chains", "recomputed_chains")}
        out |= {f"staleness/{name}": float(count) for name, count in self._counts.items()}
        for side, waited in (("learner", self._collect_seconds), ("rollout", self._idle_seconds)):
            out[f"wait/{side}"] = min(waited / seconds, 1.0)  # this call is a little later than the end of the step
        self._counts.clear()
        self._collect_seconds = self._idle_seconds = 0.0
        return out

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── groups ──

    async def _complete_groups(self, step: int) -> AsyncGenerator[PendingGroup, None]:
        """The groups of a step as they are complete, oldest first; those that were recorded, if it is repeated."""
        for group in self._recorded.pop(step, ()):
            yield group
        while True:
            self._start_groups()
            # Before looking: a group that completes between the look and the wait would not wake it up.
            self._changed.clear()
            if self._error is not None:
                raise self._error
            complete = next((group for group in self._groups.values() if group.complete), None)
            if complete is not None:
                del self._groups[complete.position]
                yield complete
            else:
                await self._changed.wait()

    def _start_groups(self) -> None:
        """Add groups up to the limit, and start those that are not running."""
        config = self.config
        if self._recorded:  # started now, they would be too old after the steps that are repeated
            return
        # Groups that later ones have overtaken are left out, so that they do not take the place of others.
        overtaken = sum(
            not group.complete and group.age(self._version) > STEPS_AHEAD for group in self._groups.values()
        )
        # Steps whose groups may run now; at the end of the run, none that no step would take.
        ahead = min(self._version + 1 + STEPS_AHEAD, config.steps) - self._taken
        while len(self._groups) - overtaken < ahead * config.tasks_per_step - self._held:
            self._add_group()
        most = config.run_options.get("max_concurrent_chains")
        running = sum(group.running is not None for group in self._groups.values())
        for group in list(self._groups.values()):
            # A group starts when all of its chains fit: those that wait would get older.
            if most is not None and running and (running + 1) * self._size > most:
                break
            if group.running is None and not group.complete:
                group.started = self._version
                group.running = asyncio.create_task(self._run_group(group))
                self._tasks.add(group.running)
                group.running.add_done_callback(self._tasks.discard)
                running += 1
        self._track_idle()

    def _add_group(self) -> None:
        position = self._sampler.position
        (task,) = self._sampler.take(1)
        self._groups[position] = PendingGroup(position, task, self._size)

    def _discard(self, group: PendingGroup, attempt: int | None) -> None:
        """Drop a group's chains; it runs again as `attempt`, unless that is None."""
        if attempt is None:
            del self._groups[group.position]
        else:
            self._groups[group.position] = PendingGroup(group.position, group.task, self._size, attempt)

    async def _run_group(self, group: PendingGroup) -> None:
        """Run the chains that a group lacks."""
        config = self.config
        # Older groups go first; another attempt samples other chains.
        settings = config.chain_settings(seed=config.seed * 1_000_003 + group.attempt)
        settings = replace(settings, priority=group.position)
        greedy = replace(settings, sampling=replace(config.sampling, temperature=0.0))
        jobs = [
            ChainJob(group.task, group.position, chain, settings if chain < config.num_chains else greedy)
            for chain in range(self._size)
            if chain not in group.chains
        ]
        chains = run_chains(
            self.agent,
            jobs,
            max_concurrent_chains=config.run_options.get("max_concurrent_chains"),
            manager=self.agent.manager,
        )
        try:
            async with aclosing(chains):
                async for chain in chains:
                    group.add(chain)
                    done = sum(len(pending.chains) for pending in self._groups.values()) + self._held * self._size
                    self._done = min(done, self._total)
                    with suppress(RecordError):  # as in PendingGroup.to_json
                        line = {"group": group.position, "attempt": group.attempt, "chain": chain.to_json()}
                        self._journal.append(line)
        except Exception as error:
            self._error = error
        finally:
            group.running = None
            self._track_idle()
            self._changed.set()
        if self._error is None:
            self._start_groups()  # those that max_concurrent_chains held back

    # ── checkpoints ──

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": [group.to_json() for group in self._groups.values()],
            "recorded": {step: [group.to_json() for group in groups] for step, groups in self._recorded.items()},
        }

    def mark_checkpoint(self, step: int) -> None:
        self._journal.reset(step)

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Load the groups of the checkpoint, then what the journal says happened after it."""
        self._taken = self._version = step
        self._groups = {record["position"]: self._load_group(record) for record in state.get("groups", ())}
        recorded = state.get("recorded", {})
        self._recorded = {int(step): [self._load_group(group) for group in groups] for step, groups in recorded.items()}
        for line in self._journal.load(step):
            positions = line["groups"] if "step" in line else [line["group"]]
            while self._sampler.position <= max(positions):
                self._add_group()
            groups = [self._groups[position] for position in positions if position in self._groups]
            if len(groups) < len(positions):
                _LOG.warning("the rollout journal lacks the beginning of group %d; its rest is not used", positions[0])
                break
            if "chain" in line:
                groups[0].add(Trajectory.from_json(line["chain"]))
            elif "discard" in line:
                self._discard(groups[0], line["discard"])
                # The journal has a discard after the batch of the step at whose end it happened.
                counts = self._repeated_counts.setdefault(step + max(len(self._recorded), 1), Counter())
                counts[_discard_metric(line["discard"])] += self.config.num_chains
            elif all(group.complete for group in groups) and line["step"] == step + len(self._recorded) + 1:
                self._recorded[line["step"]] = groups
                for position in positions:
                    del self._groups[position]
            else:
                _LOG.warning("step %d cannot be repeated: chains of it, or a step before it, are missing", line["step"])
                break
        last = step + len(self._recorded)
        for group in list(self._groups.values()):  # without a complete journal: later weights are trained once more
            if max(group.versions, default=0) > last:
                self._discard(group, group.attempt + 1)

    def _load_group(self, value: Mapping[str, Any]) -> PendingGroup:
        position = value["position"]
        group = PendingGroup(position, self._sampler.task_at(position), self._size, value["attempt"])
        for chain in value["chains"]:
            group.add(Trajectory.from_json(chain))
        return group

    # ── metrics ──

    def _track_idle(self) -> None:
        """Count the time without a running chain."""
        now = time.perf_counter()
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
        idle = not any(group.running for group in self._groups.values())
        self._idle_since = now if idle else None
