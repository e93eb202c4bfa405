"""The chains of one training step: run by the `Collector`, and selected for training by the failure policy.

A chain's `treatment`, decided when it ended, says whether it is trained:

    train, zero     yes; zero with a reward of 0
    mask            no: it carries no loss and enters no baseline
    drop_group      no, and neither is any other chain of its task

A group whose chains all have the same reward has no signal where chains are compared within a group. Where such groups
are resampled, other tasks take their place, in a bounded number of rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentfly.agent import BaseAgent
from agentfly.algorithms.base import Episode, Group, SegmentReward
from agentfly.errors import BackendFault, ConfigError, EnvironmentFault, Fault, RewardFault
from agentfly.runs.alarms import most_common_failure
from agentfly.runs.metrics import Exclusion, find_exclusions, groups, is_uniform
from agentfly.runs.record import Progress
from agentfly.training.config import TrainConfig
from agentfly.trajectory import FailureKind, TrainingTreatment, Trajectory
from agentfly.types import Task

ROUNDS = 4
"""Rounds of sampling in one step until enough groups have reward variance."""
_POLL_SECONDS = 0.5
"""Interval at which the environment pools are polled."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups of a step that are trained, and counts of the others."""

    groups: tuple[tuple[Episode, ...], ...] = ()
    chains: Mapping[str, int] = field(default_factory=dict)
    """Chains that were masked, zeroed, dropped with their group, or left alone in it."""
    zero_variance: int = 0
    """Groups whose chains all have the same reward."""

    @property
    def metrics(self) -> dict[str, float]:
        """The counts, by the name of their metric."""
        return {
            **{f"selection/{name}": float(count) for name, count in self.chains.items()},
            "selection/groups": float(len(self.groups)),
            "selection/zero_variance_groups": float(self.zero_variance),
        }

    def __add__(self, other: Selection) -> Selection:
        chains = Counter(self.chains) + Counter(other.chains)
        return Selection(self.groups + other.groups, chains, self.zero_variance + other.zero_variance)


def select_groups(
    trajectories: Iterable[Trajectory],
    *,
    min_chains: int,
    keep_zero_variance: bool,
    segment_reward: SegmentReward = "broadcast",
) -> Selection:
    """Select the chains to train, in groups of at least `min_chains`."""
    counts: Counter[str] = Counter()
    selected = []
    zero_variance = 0
    for chains in groups(trajectories):
        reasons = find_exclusions(chains, min_chains=min_chains, keep_zero_variance=keep_zero_variance)
        counts.update(each.value for each in reasons if each not in (None, Exclusion.ZERO_VARIANCE))
        if Exclusion.DROPPED in reasons:
            continue
        counts["zeroed"] += sum(chain.treatment is TrainingTreatment.ZERO for chain in chains)
        if Exclusion.ALONE not in reasons:
            compared = sum(reason is not Exclusion.MASKED for reason in reasons)
            zero_variance += compared > 1 and is_uniform(chains)
        episodes = tuple(
            Episode.from_trajectory(chain, segment_reward)
            for chain, reason in zip(chains, reasons, strict=True)
            if reason is None
        )
        if episodes:
            selected.append(episodes)
    return Selection(tuple(selected), counts, zero_variance)


def select_chains(chains: Iterable[Trajectory], config: TrainConfig) -> Selection:
    """Select the chains to train by the rules of a configuration."""
    return select_groups(
        chains,
        min_chains=config.min_chains,
        keep_zero_variance=config.zero_variance_rule == "keep",
        segment_reward=config.segment_reward,
    )


def select_greedy(chains: Iterable[Trajectory], config: TrainConfig) -> dict[int, Episode]:
    """The greedy chains that can serve as a baseline, by group."""
    selection = select_groups(chains, min_chains=1, keep_zero_variance=True, segment_reward=config.segment_reward)
    return {each.trajectory.group: each for (each,) in selection.groups}


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """All chains of one step's rollout, and which of them are trained."""

    trajectories: tuple[Trajectory, ...]
    """Including those that are not trained."""
    selection: Selection
    greedy: Mapping[int, Episode] | None = None
    """The greedy chain of each task, by group; None unless the algorithm needs one."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds of the rollout, split by what the chains spent their time on."""
    leased: int = 0
    """Maximum of environments leased at once."""
    waiting: int = 0
    """Maximum of chains waiting for an environment at once."""

    @property
    def groups(self) -> list[Group]:
        """The groups for the algorithm; where it needs a greedy chain, tasks whose greedy chain failed are left out."""
        if self.greedy is None:
            return [Group(each) for each in self.selection.groups]
        pairs = [(each, self.greedy.get(each[0].trajectory.group)) for each in self.selection.groups]
        return [Group(each, greedy) for each, greedy in pairs if greedy is not None]


def require_trainable(step: int, trajectories: Sequence[Trajectory]) -> None:
    """Raise Fault if no chain of a step can be trained, of the subclass for the component that failed most often."""
    if any(each.treatment in (TrainingTreatment.TRAIN, TrainingTreatment.ZERO) for each in trajectories):
        return
    kinds = Counter(each.failures[-1].kind for each in trajectories if each.failures)
    kind = max(kinds, key=kinds.__getitem__, default=None)
    faults = {
        FailureKind.BACKEND: BackendFault, FailureKind.ENVIRONMENT: EnvironmentFault, FailureKind.REWARD: RewardFault,
    }  # fmt: skip
    fault = Fault if kind is None else faults.get(kind, Fault)
    raise fault(
        f"not one of the {len(trajectories)} chains of step {step} can be trained{most_common_failure(trajectories)}"
    )


def split_seconds(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """The wall-clock seconds of a rollout, split in proportion to the chains' own time."""
    generate = sum(turn.generate_seconds for chain in trajectories for turn in chain.turns)
    tools = sum(turn.tool_seconds for chain in trajectories for turn in chain.turns)
    whole = max(sum(chain.seconds for chain in trajectories), generate + tools, 1e-9)
    shares = {"generate": generate / whole, "tools": tools / whole, "waiting": 1 - (generate + tools) / whole}
    return {name: share * seconds for name, share in shares.items()}


class TaskSampler:
    """An endless stream of tasks. Each epoch is its own permutation, determined by the seed.

    Its state is one number, so a resumed run continues with the next task.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        if not tasks:
            raise ConfigError("there is nothing to train on: no tasks were given")
        self._tasks = tasks
        self._seed = seed
        self.position = position
        """Number of tasks taken so far."""
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def take(self, count: int) -> list[Task]:
        """Take the next `count` tasks."""
        start = self.position
        self.position += count
        return [self.task_at(position) for position in range(start, self.position)]

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        """Called with the rewards of a task's chains after each step."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    def task_at(self, position: int) -> Task:
        """The task at a position of the stream."""
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._tasks))
        return self._tasks[int(self._order[index])]


class DifficultySampler(TaskSampler):
    """Draws tasks with a probability proportional to p · (1 − p), the variance of a success of probability p.

    p is a running estimate per task, the mean of its rewards clipped to 0 to 1, of which older steps count less. A task
    without chains has p = 1/2: it is drawn before those that all chains solve, or none.
    """

    DECAY = 0.5
    """Weight of the chains before in the estimate, per step that draws the task."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        super().__init__(tasks, seed)
        self._index = {id(task): index for index, task in enumerate(tasks)}
        self._successes = np.ones(len(tasks))  # with one success and one failure as the prior
        self._failures = np.ones(len(tasks))

    def take(self, count: int) -> list[Task]:
        """Draw `count` tasks, distinct if there are as many."""
        rng = np.random.default_rng((self._seed, self.position))
        self.position += count
        success = self._successes / (self._successes + self._failures)
        chosen: list[int] = []
        while len(chosen) < count:
            # The largest of log w + Gumbel noise are a sample without replacement with probabilities w.
            keys = np.log(success * (1 - success)) + rng.gumbel(size=len(success))
            chosen += np.argsort(-keys)[: count - len(chosen)].tolist()
        return [self._tasks[index] for index in chosen]

    def observe(self, task: Task, rewards: Sequence[float]) -> None:
        index = self._index[id(task)]
        clipped = np.clip(rewards, 0, 1)
        self._successes[index] = 1 + self.DECAY * (self._successes[index] - 1) + clipped.sum()
        self._failures[index] = 1 + self.DECAY * (self._failures[index] - 1) + (1 - clipped).sum()

    def state_dict(self) -> dict[str, Any]:
        counts = np.stack([self._successes, self._failures], 1)
        known = np.flatnonzero((counts != 1).any(1)).tolist()
        return {**super().state_dict(), "counts": {str(index): counts[index].tolist() for index in known}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for index, (successes, failures) in state["counts"].items():
            self._successes[int(index)] = successes
            self._failures[int(index)] = failures


class Collector:
    """Runs the agent on the next tasks, one step at a time: nothing runs between two calls of `collect`."""

    def __init__(
        self, agent: BaseAgent, sampler: TaskSampler, config: TrainConfig, on_progress: Callable[[Progress], None]
    ) -> None:
        self.agent = agent
        self.config = config
        self._sampler = sampler
        self._on_progress = on_progress
        self._leased = self._waiting = self._done = self._total = 0

    async def collect(self, step: int) -> RolloutBatch:
        """Run the chains of `tasks_per_step` tasks; the same step of the same run samples with the same seeds."""
        start = time.perf_counter()
        config = self.config
        trajectories: list[Trajectory] = []
        selection = Selection()
        greedy: dict[int, Episode] | None = {} if config.algorithm.needs_greedy else None
        for number in range(ROUNDS if config.zero_variance_rule == "resample" else 1):
            tasks = self._sampler.take(config.tasks_per_step - len(selection.groups))
            seed = (config.seed * 1_000_003 + step) * ROUNDS + number
            offset = number * config.tasks_per_step  # groups of later rounds are numbered on
            chains = await self._run_chains(tasks, seed, offset)
            if greedy is not None:
                sampling = replace(config.sampling, temperature=0.0)
                running = self.agent.iterate(tasks, **config.agent_options(sampling=sampling, seed=seed))
                greedy_chains = [chain async for chain in running]
                greedy |= {group + offset: each for group, each in select_greedy(greedy_chains, config).items()}
            trajectories += chains
            for own in groups(chains):
                rewards = [each.reward for each in own if each.reward is not None]
                if rewards:
                    self._sampler.observe(tasks[own[0].group - offset], rewards)
            selection += select_chains(chains, self.config)
            if len(selection.groups) == config.tasks_per_step:
                break
        return self._build_batch(step, trajectories, selection, greedy, seconds=time.perf_counter() - start)

    def advance(self, version: int) -> None:
        """Called when the weights of `version` have been sent to the backend."""

    def pop_metrics(self, seconds: float) -> dict[str, float]:
        """Metrics of the collector itself since the last call, which was `seconds` ago."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps beside the position in the tasks."""
        return {}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue after `step`, with the state of its checkpoint; empty where there is none."""

    def mark_checkpoint(self, step: int) -> None:
        """Called when the checkpoint of `step` is complete."""

    async def close(self) -> None:
        """Cancel chains that are running."""

    def _build_batch(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        selection: Selection,
        greedy: Mapping[int, Episode] | None,
        *,
        seconds: float,
    ) -> RolloutBatch:
        """The batch of a step that waited `seconds` for it. Raises Fault if no chain can be trained."""
        require_trainable(step, trajectories)
        leased, waiting = self._leased, self._waiting
        self._leased = self._waiting = 0
        return RolloutBatch(
            tuple(trajectories),
            selection,
            greedy,
            seconds=split_seconds(trajectories, seconds),
            leased=leased,
            waiting=waiting,
        )

    async def _run_chains(self, tasks: Sequence[Task], seed: int, offset: int) -> list[Trajectory]:
        """All chains of the tasks, in order, with their groups numbered from `offset`."""
        self._done = 0
        self._total = len(tasks) * self.config.num_chains
        options = self.config.agent_options(branching=True, num_chains=self.config.num_chains, seed=seed)
        chains = []
        polling = asyncio.create_task(self._poll_environments())
        try:
            # Not counted by an observer: with one, every sampled token would be decoded and reported as an event.
            async for chain in self.agent.iterate(tasks, **options):
                chains.append(replace(chain, group=chain.group + offset))
                self._done += 1
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        return sorted(chains, key=lambda each: (each.group, each.chain))

    async def _poll_environments(self) -> None:
        """Track the peak use of the environment pools, and report progress."""
        while True:
            pools = self.agent.manager.pool_metrics()
            leased = sum(each.leased for each in pools)
            waiting = sum(each.waiting for each in pools)
            self._leased = max(self._leased, leased)
            self._waiting = max(self._waiting, waiting)
            self._on_progress(Progress("generate", self._done, self._total, leased, waiting))
            await asyncio.sleep(_POLL_SECONDS)
