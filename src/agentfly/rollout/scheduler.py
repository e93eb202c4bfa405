"""Runs many chains concurrently and independently of each other.

A failed chain never ends a run, and a dead environment never ends a chain that can be retried. All leases are
released however a run ends.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.resources import GroupLeases, ResourceManager
from agentfly.rollout.chain import Chain, ChainAgent, ChainSettings
from agentfly.rollout.events import ChainEnded, ChainRetried, Event
from agentfly.runs import metrics as run_metrics
from agentfly.trajectory import Failure, Trajectory, chain_id
from agentfly.types import Task
from agentfly.validation import PositiveInt, validate

MAX_CONCURRENT_CHAINS = 1_000_000
"""Limit for runs that do not set max_concurrent_chains."""


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The trajectories of a run, ordered by task and chain."""

    trajectories: tuple[Trajectory, ...]

    def __repr__(self) -> str:
        return f"<RunResult of {len(self)} chains>"

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    @property
    def rewards(self) -> list[float | None]:
        """One number per chain; None without a reward, or if scoring failed."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def groups(self) -> list[list[Trajectory]]:
        """The chains of each task."""
        return run_metrics.groups(self.trajectories)

    @property
    def metrics(self) -> dict[str, float]:
        """Rewards, stop reasons, failures, calls and rates."""
        return run_metrics.chain_metrics(self.trajectories)


@dataclass(frozen=True, slots=True)
class ChainJob:
    """A chain to run."""

    task: Task
    group: int
    chain: int
    settings: ChainSettings


async def rollout(
    agent: ChainAgent,
    tasks: Sequence[Task],
    *,
    num_chains: int = 1,
    settings: ChainSettings | None = None,
    max_concurrent_chains: int | None = None,
    manager: ResourceManager | None = None,
) -> AsyncIterator[Trajectory]:
    """Run `num_chains` chains per task and yield each trajectory when it is finished."""
    concurrent = num_chains if max_concurrent_chains is None else max_concurrent_chains
    for name, value in (("num_chains", num_chains), ("max_concurrent_chains", concurrent)):
        validate(name, value, PositiveInt)
    total = len(tasks) * num_chains
    if max_concurrent_chains is None and total > MAX_CONCURRENT_CHAINS:
        raise ConfigError(f"{total} chains are too many to run at once; set max_concurrent_chains")
    settings = settings or ChainSettings()
    jobs = [ChainJob(task, group, chain, settings) for group, task in enumerate(tasks) for chain in range(num_chains)]
    async with aclosing(
        run_chains(agent, jobs, max_concurrent_chains=max_concurrent_chains, manager=manager)
    ) as chains:
        async for trajectory in chains:
            yield trajectory


async def run_chains(
    agent: ChainAgent,
    jobs: Sequence[ChainJob],
    *,
    max_concurrent_chains: int | None = None,
    manager: ResourceManager | None = None,
) -> AsyncGenerator[Trajectory, None]:
    """Run the given chains, each with its own settings, and yield each trajectory when it is finished."""
    tasks = list({job.group: job.task for job in jobs}.values())
    validate_run(agent, tasks)
    manager = manager or ResourceManager()
    if tasks and (env_classes := _environments_of(agent, tasks[0])):
        await manager.warm_up(env_classes)
    groups = Groups(manager, Counter(job.group for job in jobs))
    done: asyncio.Queue[Trajectory | Exception] = asyncio.Queue()
    pending = iter(jobs)

    async def work() -> None:
        for job in pending:
            settings = _guard_observer(job.settings, done.put_nowait)
            try:
                done.put_nowait(await run_chain(agent, job.task, job.group, job.chain, settings, groups))
            except Exception as error:
                done.put_nowait(error)
                return

    with infrequent_gc:
        workers = [asyncio.create_task(work()) for _ in range(min(len(jobs), max_concurrent_chains or len(jobs)))]
        try:
            for _ in jobs:
                finished = await done.get()
                if isinstance(finished, Exception):
                    raise finished
                yield finished
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            groups.close()


class _InfrequentGC:
    """Raises the garbage collector's threshold while chains run; the last run to end restores it.

    Chains create many small objects and few reference cycles, and each collection takes time proportional to the
    number of chains.
    """

    THRESHOLD = 20_000

    def __init__(self) -> None:
        self._runs = 0
        self._before = gc.get_threshold()

    def __enter__(self) -> None:
        if self._runs == 0:
            self._before = gc.get_threshold()
            if 0 < self._before[0] < self.THRESHOLD:
                gc.set_threshold(self.THRESHOLD, *self._before[1:])
        self._runs += 1

    def __exit__(self, *_: object) -> None:
        self._runs -= 1
        if self._runs == 0:
            gc.set_threshold(*self._before)


infrequent_gc = _InfrequentGC()


def validate_run(agent: ChainAgent, tasks: Sequence[Task]) -> None:
    """Raise before the first token what would fail in every chain: missing columns, a template error."""
    for task in tasks:
        if agent.scorer is not None:
            try:
                agent.scorer.check(task)
            except ConfigError as error:
                raise ConfigError(f"task {task.id or task.question[:40]!r}: {error}") from None
    if tasks and agent.template is not None:
        agent.template.start(agent.initial_messages(tasks[0]))


def _guard_observer(settings: ChainSettings, report: Callable[[Exception], None]) -> ChainSettings:
    """Wrap the observer: what it raises fails the run, not the chain of the event."""
    observer = settings.observer
    if observer is None:
        return settings

    def observe(event: Event) -> None:
        try:
            observer(event)
        except Exception as error:
            report(error)

    return replace(settings, observer=observe)


def _environments_of(agent: ChainAgent, task: Task) -> Sequence[type[Environment]]:
    """The environment classes that a chain of this task may use."""
    if agent.scorer is None:
        return agent.toolbox.environments
    return (*agent.toolbox.environments, *agent.scorer.environments(task))


class Groups:
    """The leases that the chains of each task share; released when the last chain of the task has ended."""

    def __init__(self, manager: ResourceManager, chains: Mapping[int, int]) -> None:
        """`chains`: number of chains per group."""
        self.manager = manager
        self._chains = chains
        self._open: dict[int, tuple[GroupLeases, int]] = {}

    def enter(self, number: int) -> GroupLeases:
        """Return the leases of a group for a chain that starts."""
        if number not in self._open:
            self._open[number] = (self.manager.group(), self._chains[number])
        return self._open[number][0]

    def leave(self, number: int) -> None:
        """Count a chain of the group as ended, after its last attempt."""
        group, left = self._open[number]
        self._open[number] = (group, left - 1)
        if left == 1:
            del self._open[number]
            group.close()

    def close(self) -> None:
        """Release the leases of all groups."""
        for group, _ in self._open.values():
            group.close()
        self._open.clear()


async def run_chain(
    agent: ChainAgent, task: Task, group: int, chain: int, settings: ChainSettings, groups: Groups
) -> Trajectory:
    """Run one chain; retry it with new environment instances as the failure policy says."""
    failures: tuple[Failure, ...] = ()
    attempt = 0
    env_classes = _environments_of(agent, task)
    name = chain_id(group, chain)
    shared = groups.enter(group) if env_classes else None
    while True:
        async with groups.manager.leases(task, env_classes, group=shared, chain=name) as leases:
            chain_class = getattr(agent, "chain_class", Chain)
            trajectory = await chain_class(agent, task, group, chain, settings, leases).run(attempt, failures)
        kind = trajectory.stop.failure
        if kind is None or not settings.failures.should_retry(kind) or attempt >= settings.failures.retries:
            break
        failures = trajectory.failures
        attempt += 1
        if settings.observer is not None:
            settings.observer(ChainRetried(group, chain, failures[-1]))
    if shared is not None:
        groups.leave(group)
    if settings.observer is not None:
        settings.observer(ChainEnded(group, chain, trajectory))
    return trajectory
