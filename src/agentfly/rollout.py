"""Many chains at once, each on its own clock.

One bad chain never ends a run, and a dead environment never ends a chain that could be run anew. However a run ends,
everything that its chains were lent goes back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from agentfly.chain import Chain, ChainAgent, Settings
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.events import ChainEnded, Event, Retried
from agentfly.outcome import CallStatus, Failure, FailureKind
from agentfly.resources import ResourceManager
from agentfly.trajectory import Trajectory
from agentfly.types import Task


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
    if num_chains < 1 or (max_concurrent_chains is not None and max_concurrent_chains < 1):
        raise ConfigError(
            f"num_chains and max_concurrent_chains must be at least 1, not {num_chains} and {max_concurrent_chains}"
        )
    _refuse_what_cannot_start(agent, tasks)
    jobs = ((task, group, chain) for group, task in enumerate(tasks) for chain in range(num_chains))
    lender = manager or ResourceManager()
    done: asyncio.Queue[Trajectory | Exception] = asyncio.Queue()
    settings = _watched(settings or Settings(), done.put_nowait)

    async def work() -> None:
        for task, group, chain in jobs:
            try:
                done.put_nowait(await run_chain(agent, task, group, chain, settings, lender))
            except Exception as error:
                done.put_nowait(error)
                return

    total = len(tasks) * num_chains
    workers = [asyncio.create_task(work()) for _ in range(min(total, max_concurrent_chains or total))]
    try:
        for _ in range(total):
            finished = await done.get()
            if isinstance(finished, Exception):
                raise finished
            yield finished
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _refuse_what_cannot_start(agent: ChainAgent, tasks: Sequence[Task]) -> None:
    """Find out before the first token what would fail in every chain."""
    for task in tasks:
        if agent.scorer is not None:
            agent.scorer.check(task)
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


async def run_chain(
    agent: ChainAgent, task: Task, group: int, chain: int, settings: Settings, manager: ResourceManager
) -> Trajectory:
    """One chain, run anew with fresh environments as often as the failure policy says."""
    failures: tuple[Failure, ...] = ()
    attempt = 0
    while True:
        async with manager.leases(task) as leases:
            trajectory = await Chain(agent, task, group, chain, settings, leases).run(attempt, failures)
            try:
                await leases.release()
            except EnvironmentFault as error:
                left = Failure(FailureKind.ENVIRONMENT, str(error), len(trajectory.turns), attempt)
                trajectory = replace(trajectory, failures=(*trajectory.failures, left))
        kind = trajectory.stop.failure
        if kind is None or not settings.failures.retried(kind) or attempt >= settings.failures.retries:
            break
        failures, attempt = trajectory.failures, attempt + 1
        if settings.observer is not None:
            settings.observer(Retried(group, chain, failures[-1]))
    if settings.observer is not None:
        settings.observer(ChainEnded(group, chain, trajectory))
    return trajectory


@dataclass(frozen=True, slots=True, repr=False)
class RunResult:
    """The trajectories of a run, in the order of tasks and chains."""

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
        """One number a chain; None where there was no reward or none could be had."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def groups(self) -> list[list[Trajectory]]:
        """The chains of each task together."""
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in self.trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        return list(groups.values())

    @property
    def metrics(self) -> dict[str, float]:
        """What the run was like: ends, failures, calls and rates."""
        calls = Counter(call.status for trajectory in self for call in trajectory.calls)
        rewards = [reward for reward in self.rewards if reward is not None]
        chains, made = max(len(self), 1), max(calls.total(), 1)
        out = {
            "chains": float(len(self)),
            "turns": sum(len(t.turns) for t in self) / chains,
            "sampled_tokens": sum(t.sampled_tokens for t in self) / chains,
            "segments": sum(len(t.segments) for t in self) / chains,
            "calls": calls.total() / chains,
            "retries": float(sum(t.attempts - 1 for t in self)),
            "hallucination_rate": calls[CallStatus.UNKNOWN] / made,
            "invalid_call_rate": calls[CallStatus.INVALID] / made,
            "tool_error_rate": calls[CallStatus.ERROR] / made,
        }
        if rewards:
            out["reward"] = sum(rewards) / len(rewards)
        out.update({f"stop/{stop.value}": n for stop, n in Counter(t.stop for t in self).items()})
        kinds = Counter(failure.kind for trajectory in self for failure in trajectory.failures)
        out.update({f"failure/{kind.value}": n for kind, n in kinds.items()})
        return out
