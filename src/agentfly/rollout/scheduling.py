"""Many chains at once, each on its own clock.

One bad chain never ends a run, and a dead environment never ends a chain that could be run anew. However a run ends,
everything that its chains were lent goes back.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.outcome import Failure
from agentfly.resources import Group, ResourceManager
from agentfly.rollout.chain import Chain, ChainAgent, Settings
from agentfly.rollout.events import ChainEnded, Event, Retried
from agentfly.trajectory import Trajectory, chain_id
from agentfly.types import Task

MOST_AT_ONCE = 1_000_000
"""Chains that are run at once without being asked for."""


async def rollout(
    agent: ChainAgent,
    tasks: Sequence[Task],
    *,
    num_chains: int = 1,
    settings: Settings | None = None,
    max_concurrent_chains: int | None = None,
    manager: ResourceManager | None = None,
) -> AsyncIterator[Trajectory]:
    """Run `num_chains` chains of every task and yield each trajectory as it is finished."""
    at_once = num_chains if max_concurrent_chains is None else max_concurrent_chains
    for name, value in (("num_chains", num_chains), ("max_concurrent_chains", at_once)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    if max_concurrent_chains is None and len(tasks) * num_chains > MOST_AT_ONCE:
        raise ConfigError(f"{len(tasks) * num_chains} chains are too many to run at once; give max_concurrent_chains")
    given = settings or Settings()
    jobs = [Job(task, group, chain, given) for group, task in enumerate(tasks) for chain in range(num_chains)]
    async with aclosing(run_jobs(agent, jobs, max_concurrent_chains=max_concurrent_chains, manager=manager)) as chains:
        async for trajectory in chains:
            yield trajectory


@dataclass(frozen=True, slots=True)
class Job:
    """A chain to run."""

    task: Task
    group: int
    chain: int
    settings: Settings


async def run_jobs(
    agent: ChainAgent,
    jobs: Sequence[Job],
    *,
    max_concurrent_chains: int | None = None,
    manager: ResourceManager | None = None,
) -> AsyncGenerator[Trajectory, None]:
    """Run just these chains, each with its own settings, and yield each trajectory as it is finished."""
    tasks = list({job.group: job.task for job in jobs}.values())
    refuse_what_cannot_start(agent, tasks)
    lender = manager or ResourceManager()
    if tasks and (plan := _plan(agent, tasks[0])):
        await lender.warm_up(plan)
    groups = Groups(lender, Counter(job.group for job in jobs))
    done: asyncio.Queue[Trajectory | Exception] = asyncio.Queue()
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            settings = _watched(job.settings, done.put_nowait)
            try:
                done.put_nowait(await run_chain(agent, job.task, job.group, job.chain, settings, groups))
            except Exception as error:
                done.put_nowait(error)
                return

    with _rare_collections:
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


class _RareCollections:
    """While chains run, the garbage collector looks less often.

    Chains leave many small objects and hardly a cycle among them, and every look at all of them takes longer the more
    chains there are. What the threshold was before comes back when the last run ends.
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


_rare_collections = _RareCollections()


def refuse_what_cannot_start(agent: ChainAgent, tasks: Sequence[Task]) -> None:
    """Find out before the first token what would fail in every chain."""
    for task in tasks:
        if agent.scorer is not None:
            try:
                agent.scorer.check(task)
            except ConfigError as error:
                raise ConfigError(f"task {task.id or task.question[:40]!r}: {error}") from None
    if tasks and agent.template is not None:
        agent.template.start(agent.opening(tasks[0]))


def _watched(settings: Settings, report: Callable[[Exception], None]) -> Settings:
    """An observer that raises fails the run, with what it raised, and never the chain it was told of."""
    observer = settings.observer
    if observer is None:
        return settings

    def observe(event: Event) -> None:
        try:
            observer(event)
        except Exception as error:
            report(error)

    return replace(settings, observer=observe)


def _plan(agent: ChainAgent, task: Task) -> Sequence[type[Environment]]:
    """The environments that a chain may touch."""
    if agent.scorer is None:
        return agent.toolbox.environments
    return (*agent.toolbox.environments, *agent.scorer.environments(task))


class Groups:
    """What the chains of each task share, given back when the last chain of the task has ended."""

    def __init__(self, manager: ResourceManager, chains: Mapping[int, int]) -> None:
        """`chains`: how many of each group there will be."""
        self.manager, self._chains = manager, chains
        self._open: dict[int, tuple[Group, int]] = {}

    def enter(self, number: int) -> Group:
        """The group of a chain that begins."""
        if number not in self._open:
            self._open[number] = (self.manager.group(), self._chains[number])
        return self._open[number][0]

    def leave(self, number: int) -> None:
        """A chain has ended for good."""
        group, left = self._open[number]
        self._open[number] = (group, left - 1)
        if left == 1:
            del self._open[number]
            group.close()

    def close(self) -> None:
        """The run is over."""
        for group, _ in self._open.values():
            group.close()
        self._open.clear()


async def run_chain(
    agent: ChainAgent, task: Task, group: int, chain: int, settings: Settings, groups: Groups
) -> Trajectory:
    """One chain, run anew with fresh environments as often as the failure policy says."""
    failures: tuple[Failure, ...] = ()
    attempt, plan, name = 0, _plan(agent, task), chain_id(group, chain)
    shared = groups.enter(group)
    while True:
        async with groups.manager.leases(task, plan, group=shared, chain=name) as leases:
            trajectory = await Chain(agent, task, group, chain, settings, leases).run(attempt, failures)
        kind = trajectory.stop.failure
        if kind is None or not settings.failures.retried(kind) or attempt >= settings.failures.retries:
            break
        failures, attempt = trajectory.failures, attempt + 1
        if settings.observer is not None:
            settings.observer(Retried(group, chain, failures[-1]))
    groups.leave(group)
    if settings.observer is not None:
        settings.observer(ChainEnded(group, chain, trajectory))
    return trajectory
