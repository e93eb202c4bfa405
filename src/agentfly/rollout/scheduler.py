"""Runs many chains concurrently and independently of each other.

A failed chain never ends a run, and a dead environment never ends a chain that can be retried. All leases are
released however a run ends.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from agentfly.environment import Environment, Scope, can_branch
from agentfly.errors import ConfigError, DataError
from agentfly.resources import GroupLeases, ResourceManager
from agentfly.rollout.chain import Chain, ForkPoint
from agentfly.rollout.config import ChainAgent, ChainSettings
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
        scores = [reward for reward in self.rewards if reward is not None]
        mean = [f"mean reward {sum(scores) / len(scores):.4g}"] if scores else []
        reason = [self.unscored_reason] if self.unscored_reason else []
        return f"<RunResult of {len(self)} {'chain' if len(self) == 1 else 'chains'}: {'; '.join(mean + reason)}>"

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
    def unscored_reason(self) -> str:
        """Why rewards are None: how many, and the most frequent reason. Empty if every chain has one."""
        reasons = Counter(trajectory.unscored_reason for trajectory in self if trajectory.score is None)
        if not reasons:
            return ""
        (reason, count), *other_reasons = reasons.most_common()
        number = f"{reasons.total()} of {len(self)} chains have no reward"
        return f"{number}: {reason}" + (f" ({count} of them)" if other_reasons else "")

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
    branch_of: int | None = None
    """Chain of the group that it is forked from; None: it begins with the task."""
    start: ForkPoint | None = None
    """Where it is forked; None: it begins with the task."""


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
    """Run the given chains, each with its own settings, and yield each trajectory when it is finished.

    Branches of a chain are further jobs, added when it reaches its branching point.
    """
    tasks = list({job.group: job.task for job in jobs}.values())
    validate_run(agent, tasks)
    manager = manager or ResourceManager()
    if tasks and (env_classes := _environments_of(agent, tasks[0])):
        await manager.warm_up(env_classes)
    if any(job.settings.branching is not None for job in jobs):
        _refuse_unbranchable(_environments_of(agent, tasks[0]))
    roots = Counter(job.group for job in jobs)
    groups = Groups(manager, roots)
    # Exceptions travel through the queue, too: raised in a worker, the run would wait for its chain forever.
    done: asyncio.Queue[Trajectory | Exception] = asyncio.Queue()
    pending = deque(jobs)
    workers: list[asyncio.Task[None]] = []
    unfinished = len(jobs)
    idle = 0

    async def work() -> None:
        nonlocal idle
        # A few workers take the jobs: a task per job would hold a million coroutines where 64 chains may run at once.
        while pending:
            job = pending.popleft()
            settings = _guard_observer(job.settings, done.put_nowait)
            try:
                done.put_nowait(await run_chain(agent, replace(job, settings=settings), groups, partial(fork, job)))
            except Exception as error:
                done.put_nowait(error)
                return
        idle += 1

    def start_workers(chains: int) -> None:
        """One worker per chain, up to the limit."""
        room = chains if max_concurrent_chains is None else max_concurrent_chains - (len(workers) - idle)
        workers.extend(asyncio.create_task(work()) for _ in range(min(chains, room)))

    def fork(job: ChainJob, point: ForkPoint) -> None:
        """Add the branches of a chain, to run before chains that have not begun: its prefix is in the cache now."""
        nonlocal unfinished
        assert job.settings.branching is not None
        new_branches = job.settings.branching.branches - 1
        # Numbers of branches follow from the chain, not from the order in which chains reach their fork: seeds depend
        # on them, and the run could not be repeated otherwise.
        first = roots[job.group] + job.chain * new_branches
        numbers = range(first, first + new_branches)
        pending.extendleft(replace(job, chain=number, branch_of=job.chain, start=point) for number in numbers)
        groups.add(job.group, new_branches)
        unfinished += new_branches
        start_workers(new_branches)

    with infrequent_gc:
        start_workers(len(jobs))
        try:
            while unfinished:
                finished = await done.get()
                unfinished -= 1
                if isinstance(finished, Exception):
                    raise finished
                yield finished
        finally:
            # Also when the caller stops reading: chains that went on would hold environments and sample for no reader.
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
    """Raise before the first token what would fail or mislead in every chain: missing columns, a prompt that holds the
    reply, tools that the agent lacks, a template error."""
    for task in tasks:
        try:
            if task.messages and task.messages[-1].role == "assistant":
                raise DataError(
                    "its messages end with a reply of the assistant, which would be part of the prompt; leave it out, "
                    "and store it in a column for the reward (conversations to imitate are for `agentfly sft`)"
                )
            if agent.scorer is None or not agent.scorer.takes("tools"):
                agent.toolbox.check_column(task)
            if agent.scorer is not None:
                agent.scorer.check(task)
        except ConfigError as error:
            raise type(error)(f"task {task.id or task.question[:40]!r}: {error}") from None
    if tasks and agent.template is not None:
        agent.template.start(agent.initial_messages(tasks[0]))


def _refuse_unbranchable(env_classes: Sequence[type[Environment]]) -> None:
    """Raise ConfigError for environments whose state cannot be copied."""
    for env_class in env_classes:
        scope = env_class.pool.scope
        if scope is Scope.GROUP:
            raise ConfigError(f"{env_class.__name__} is shared by the chains of a task: they cannot be branched")
        if scope is Scope.CHAIN and not can_branch(env_class):
            raise ConfigError(f"{env_class.__name__} cannot be branched: give it the methods `snapshot` and `restore`")


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
        self._chains_left = Counter(chains)
        self._open: dict[int, GroupLeases] = {}

    def add(self, number: int, count: int) -> None:
        """Expect further chains of a group, one of which is running."""
        self._chains_left[number] += count

    def enter(self, number: int) -> GroupLeases:
        """Return the leases of a group for a chain that starts."""
        if number not in self._open:
            self._open[number] = self.manager.group()
        return self._open[number]

    def leave(self, number: int) -> None:
        """Count a chain of the group as ended, after its last attempt."""
        # A retried chain leaves once: counted per attempt, the group's environments would be released while other
        # chains of the task use them.
        self._chains_left[number] -= 1
        if not self._chains_left[number]:
            self._open.pop(number).close()

    def close(self) -> None:
        """Release the leases of all groups."""
        for group in self._open.values():
            group.close()
        self._open.clear()


async def run_chain(
    agent: ChainAgent, job: ChainJob, groups: Groups, on_fork: Callable[[ForkPoint], None]
) -> Trajectory:
    """Run one chain; retry it with new environment instances as the failure policy says.

    on_fork: called once, at the branching point; later attempts of the chain continue from there, too.
    """
    task, group, chain, settings = job.task, job.group, job.chain, job.settings
    start = job.start

    def fork(point: ForkPoint) -> None:
        nonlocal start
        start = point
        on_fork(point)

    failures: tuple[Failure, ...] = ()
    attempt = 0
    env_classes = _environments_of(agent, task)
    name = chain_id(group, chain)
    shared = groups.enter(group) if env_classes else None
    while True:
        async with groups.manager.leases(task, env_classes, group=shared, chain=name) as leases:
            chain_class = getattr(agent, "chain_class", Chain)
            notify = fork if start is None else None
            running_chain = chain_class(agent, task, group, chain, settings, leases, start=start, on_fork=notify)
            trajectory = await running_chain.run(attempt, failures)
        # The leases are released here, before another attempt: with one instance, it would wait for that of the last
        # one.
        kind = trajectory.stop.failure
        if kind is None or not settings.failures.should_retry(kind) or attempt >= settings.failures.retries:
            break
        failures = trajectory.failures
        attempt += 1
        if settings.observer is not None:
            settings.observer(ChainRetried(group, chain, failures[-1]))
    if shared is not None:
        groups.leave(group)
    if job.branch_of is not None and job.start is not None:
        trajectory = replace(trajectory, branch_of=job.branch_of, branch_turn=job.start.turn)
    if settings.observer is not None:
        settings.observer(ChainEnded(group, chain, trajectory))
    return trajectory
