"""Two thousand chains over sixty-four instances that crash, hang, start slowly or not at all; some are cancelled."""

import asyncio
import random
from collections import Counter
from statistics import median
from typing import ClassVar

from agentfly import Environment, Pool, Task, reward, tool
from agentfly.agent import BaseAgent
from agentfly.errors import EnvironmentFault
from agentfly.resources import ResourceManager
from agentfly.trajectory import StopReason, Trajectory
from tests.fakes import byte_agent, call

INSTANCES = 64


class Wild(Environment):
    """Misbehaves by chance, and knows when it is used by two chains at once."""

    pool = Pool(max_instances=INSTANCES, start_timeout=0.2, reset_timeout=0.2, idle_seconds=0.05, min_warm=4)
    draw: ClassVar[random.Random] = random.Random(7)
    alive: ClassVar[set[int]] = set()
    most_alive: ClassVar[int] = 0
    lent_twice: ClassVar[list[str]] = []
    owner: object = None
    busy = False

    async def start(self) -> None:
        Wild.alive.add(id(self))
        Wild.most_alive = max(Wild.most_alive, len(Wild.alive))
        await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.02]))
        match self.draw.randrange(30):
            case 0:
                raise OSError("did not start")
            case 1:
                await asyncio.sleep(60)

    async def reset(self, task: Task) -> None:
        if self.busy:
            self.lent_twice.append("reset during an action")
        self.owner = task
        if self.draw.random() < 0.02:
            raise OSError("did not reset")

    @tool(timeout=0.2)
    async def act(self) -> str:
        """Act."""
        if self.busy:
            self.lent_twice.append("two acted")
        self.busy, owner = True, self.owner
        try:
            await asyncio.sleep(self.draw.choice([0, 0.001, 0.003]))
            match self.draw.randrange(100):
                case 0 | 1:
                    raise EnvironmentFault("crashed")
                case 2:
                    await asyncio.sleep(60)
                case 3:
                    raise ValueError("a bug, which the world survives")
        finally:
            self.busy = False
        if self.owner is not owner:
            self.lent_twice.append("another chain's reset came between")
        return "acted"

    async def close(self) -> None:
        await asyncio.sleep(0)
        Wild.alive.discard(id(self))


@reward
def is_owner(env: Wild, task: Task) -> float:
    return float(env.owner is task)


async def test_every_chain_ends_and_no_instance_is_leased_twice_or_leaked() -> None:
    manager = ResourceManager()
    agents = [
        byte_agent([call("act"), call("act"), "done"], tools=[Wild], reward=is_owner, manager=manager) for _ in range(8)
    ]
    running = [asyncio.create_task(run_all(agent)) for agent in agents]
    await asyncio.sleep(0.3)
    for task in running[6:]:
        task.cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    assert [type(outcome) for outcome in ended[6:]] == [asyncio.CancelledError] * 2
    chains = [chain for run in ended[:6] if not isinstance(run, BaseException) for chain in run]
    assert len(chains) == 6 * 250
    stops = Counter(chain.stop for chain in chains)
    assert set(stops) <= {StopReason.ANSWER, StopReason.ENVIRONMENT_FAULT, StopReason.TOOL_TIMEOUT}
    assert stops[StopReason.ANSWER] > 1200  # most failed chains succeed when they are retried
    assert all(chain.failures for chain in chains if chain.stop is StopReason.ENVIRONMENT_FAULT)
    assert {chain.reward for chain in chains if chain.stop is StopReason.ANSWER} == {1.0}
    assert Wild.lent_twice == []
    (figures,) = manager.pool_metrics()
    assert (figures.leased, figures.waiting) == (0, 0)
    assert figures.evicted > 20
    await manager.close()
    assert (manager.num_instances, Wild.alive, asyncio.all_tasks()) == (0, set(), {asyncio.current_task()})
    assert Wild.most_alive <= INSTANCES


async def run_all(agent: BaseAgent) -> list[Trajectory]:
    return [chain async for chain in agent.iterate([f"Task {n}" for n in range(250)], failures={"retries": 3})]


class Even(Environment):
    pool = Pool(max_instances=INSTANCES)


async def test_longest_wait_is_below_three_times_the_median() -> None:
    """A wait is counted in lends between the asking and the getting, which no busy machine can stretch."""
    manager, waits, lends = ResourceManager(), [], 0

    async def chain() -> None:
        nonlocal lends
        requested = lends
        async with manager.leases(Task.of("Q"), [Even]) as leases:
            await leases.get(Even)
            waits.append(lends - requested)
            lends += 1
            for _ in range(random.Random(len(waits)).randrange(3, 6)):
                await asyncio.sleep(0)

    async def worker() -> None:
        for _ in range(10):
            await chain()

    await asyncio.gather(*(worker() for _ in range(200)))
    steady = waits[200:-200]
    assert len(waits) == 2000
    assert max(steady) <= 3 * median(steady)
    await manager.close()
