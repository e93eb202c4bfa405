"""The chains of one training step.

Where groups without reward variance are resampled, other tasks take their place, in a bounded number of rounds.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentfly.agent import BaseAgent
from agentfly.algorithms.base import Episode, Group
from agentfly.errors import BackendFault, EnvironmentFault, Fault, RewardFault
from agentfly.runs.alarms import most_common_failure
from agentfly.runs.metrics import groups
from agentfly.runs.record import Progress
from agentfly.training.config import TrainConfig
from agentfly.training.selection import Selection, select_chains, select_greedy
from agentfly.training.task_sampler import TaskSampler
from agentfly.trajectory import FailureKind, TrainingTreatment, Trajectory
from agentfly.types import Task

ROUNDS = 4
"""Rounds of sampling in one step until enough groups have reward variance."""
_POLL_SECONDS = 0.5
"""Interval at which the environment pools are polled."""


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
            return [Group(episodes) for episodes in self.selection.groups]
        pairs = [(episodes, self.greedy.get(episodes[0].trajectory.group)) for episodes in self.selection.groups]
        return [Group(episodes, greedy) for episodes, greedy in pairs if greedy is not None]


def require_trainable(step: int, trajectories: Sequence[Trajectory]) -> None:
    """Raise Fault if no chain of a step can be trained, of the subclass for the component that failed most often."""
    if any(chain.treatment in (TrainingTreatment.TRAIN, TrainingTreatment.ZERO) for chain in trajectories):
        return
    kinds = Counter(chain.failures[-1].kind for chain in trajectories if chain.failures)
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


class Collector(ABC):
    """Provides the chains of each step to the trainer.

    The methods beside `collect` do nothing by default: they are for a collector whose chains run between two steps.
    """

    @abstractmethod
    async def collect(self, step: int) -> RolloutBatch:
        """Return the chains of the next `tasks_per_step` tasks. Raises Fault if none of them can be trained."""

    def advance(self, version: int) -> None:  # noqa: B027
        """Called when the weights of `version` have been sent to the backend."""

    def pop_metrics(self, seconds: float) -> dict[str, float]:
        """Metrics of the collector itself since the last call, which was `seconds` ago."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """JSON values that a checkpoint keeps beside the position in the tasks."""
        return {}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue after `step`, with the state of its checkpoint; empty where there is none."""

    def mark_checkpoint(self, step: int) -> None:  # noqa: B027
        """Called when the checkpoint of `step` is complete."""

    async def close(self) -> None:  # noqa: B027
        """Cancel chains that are running."""


class StepCollector(Collector):
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
                greedy |= {group + offset: episode for group, episode in select_greedy(greedy_chains, config).items()}
            trajectories += chains
            for group in groups(chains):
                rewards = [chain.reward for chain in group if chain.reward is not None]
                if rewards:
                    self._sampler.observe(tasks[group[0].group - offset], rewards)
            selection += select_chains(chains, self.config)
            if len(selection.groups) == config.tasks_per_step:
                break
        return self._build_batch(step, trajectories, selection, greedy, seconds=time.perf_counter() - start)

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
        return sorted(chains, key=lambda chain: (chain.group, chain.chain))

    async def _poll_environments(self) -> None:
        """Track the peak use of the environment pools, and report progress."""
        while True:
            pools = self.agent.manager.pool_metrics()
            leased = sum(pool.leased for pool in pools)
            waiting = sum(pool.waiting for pool in pools)
            self._leased = max(self._leased, leased)
            self._waiting = max(self._waiting, waiting)
            self._on_progress(Progress("generate", self._done, self._total, leased, waiting))
            await asyncio.sleep(_POLL_SECONDS)
