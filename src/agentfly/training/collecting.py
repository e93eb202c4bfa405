"""The chains of one step: run, and sorted out.

Where groups without variance are to be sampled again, other tasks take their place, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentfly.agent import BaseAgent
from agentfly.algorithm import Episode, Group, Needs
from agentfly.errors import Fault
from agentfly.outcome import Treatment
from agentfly.rollout.events import ChainEnded, Event
from agentfly.runs.alarms import most_common_failure
from agentfly.runs.record import Progress
from agentfly.training.config import TrainConfig
from agentfly.training.feed import Feed
from agentfly.training.selection import Selection, select
from agentfly.trajectory import Trajectory
from agentfly.types import Task

ROUNDS = 4
"""How often tasks are drawn in one step until enough groups have variance."""
_WATCHED = 0.5
"""Seconds between two looks at the environments."""

Watcher = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Collected:
    """What one step's rollout brought."""

    trajectories: tuple[Trajectory, ...]
    """All of them, also those that are not trained."""
    selection: Selection
    greedy: Mapping[int, Episode] | None = None
    """A greedy chain of each task, by group; None where the algorithm needs none."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long it took, split by what the chains spent their time on."""
    lent: int = 0
    waiting: int = 0

    @property
    def groups(self) -> list[Group]:
        """What the algorithm sees; where it needs a greedy chain, a task whose failed is left out."""
        if self.greedy is None:
            return [Group(each) for each in self.selection.groups]
        pairs = [(each, self.greedy.get(each[0].trajectory.group)) for each in self.selection.groups]
        return [Group(each, greedy) for each, greedy in pairs if greedy is not None]


class Collector:
    """Runs the agent on the next tasks."""

    def __init__(self, agent: BaseAgent, feed: Feed, config: TrainConfig, watcher: Watcher) -> None:
        self.agent, self.feed, self.config, self._watcher = agent, feed, config, watcher
        self._lent = self._waiting = self._done = self._total = 0

    async def collect(self, step: int) -> Collected:
        """The chains of `tasks_per_step` tasks; the same step of the same run gives the same ones."""
        begun, config = time.perf_counter(), self.config
        needs = config.algorithm.needs
        found, selection = list[Trajectory](), Selection()
        greedy: dict[int, Episode] | None = {} if Needs.GREEDY in needs else None
        self._lent = self._waiting = 0
        for number in range(ROUNDS if config.skips == "resample" else 1):
            tasks = self.feed.take(config.tasks_per_step - len(selection.groups))
            seed, offset = _seed(config.seed, step, number), number * config.tasks_per_step
            chains = await self._chains(tasks, seed, offset)
            if greedy is not None:
                greedy |= await self._greedy(tasks, seed, offset)
            found += chains
            selection += select(
                chains,
                least=2 if Needs.GROUPS in needs else 1,
                keep_flat=config.skips == "keep",
                segment_reward=config.segment_reward,
            )
            if len(selection.groups) == config.tasks_per_step:
                break
        if not any(each.treatment in (Treatment.TRAIN, Treatment.ZERO) for each in found):
            raise Fault(f"not one of the {len(found)} chains of step {step} can be trained{most_common_failure(found)}")
        seconds = _split(found, time.perf_counter() - begun)
        return Collected(tuple(found), selection, greedy, seconds, self._lent, self._waiting)

    async def _chains(self, tasks: Sequence[Task], seed: int, offset: int) -> list[Trajectory]:
        """All chains of the tasks, in order, their groups counted from `offset`."""
        self._done, self._total = 0, len(tasks) * self.config.num_chains
        watching = asyncio.create_task(self._watch())
        try:
            options = {"sampling": self.config.sampling, "seed": seed, "observer": self._observe}
            result = await self._run(tasks, self.config.num_chains, options)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        return [replace(each, group=each.group + offset) for each in result]

    async def _greedy(self, tasks: Sequence[Task], seed: int, offset: int) -> dict[int, Episode]:
        sampling = replace(self.config.sampling, temperature=0.0)
        result = await self._run(tasks, 1, {"sampling": sampling, "seed": seed})
        kept = select(result, least=1, keep_flat=True, segment_reward=self.config.segment_reward).groups
        return {each.trajectory.group + offset: each for (each,) in kept}

    async def _run(self, tasks: Sequence[Task], num_chains: int, options: Mapping[str, Any]) -> Any:
        given: Any = {**self.config.run_options, **options}
        return await self.agent.run(tasks, self.config.max_turns, num_chains, **given)

    def _observe(self, event: Event) -> None:
        if isinstance(event, ChainEnded):
            self._done += 1

    async def _watch(self) -> None:
        """Look at the environments now and then, and say how far the step is."""
        while True:
            figures = self.agent.manager.figures()
            lent, waiting = (sum(getattr(each, name) for each in figures) for name in ("lent", "waiting"))
            self._lent, self._waiting = max(self._lent, lent), max(self._waiting, waiting)
            self._watcher(Progress("generate", self._done, self._total, lent, waiting))
            await asyncio.sleep(_WATCHED)


def _seed(seed: int, step: int, number: int) -> int:
    return (seed * 1_000_003 + step) * ROUNDS + number


def _split(chains: Sequence[Trajectory], wall: float) -> dict[str, float]:
    """The wall clock shared out as the chains spent their own time: sampling, in tools, and waiting for their turn."""
    generate = sum(turn.generate_seconds for chain in chains for turn in chain.turns)
    tools = sum(turn.tool_seconds for chain in chains for turn in chain.turns)
    whole = max(sum(chain.seconds for chain in chains), generate + tools, 1e-9)
    shares = {"generate": generate / whole, "tools": tools / whole}
    return {**{name: share * wall for name, share in shares.items()}, "waiting": wall * (1 - sum(shares.values()))}
