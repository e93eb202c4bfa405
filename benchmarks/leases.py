"""What the resource manager itself costs: lending a warm instance and taking it back, in few and in many.

Every instance is warm and the environment does nothing, so all time is the manager's. Beside it, an `asyncio.Queue` of
the same objects: the least that any pool of an event loop costs.

    python -m benchmarks.leases [--quick]
"""

import argparse
import asyncio
import time
from collections.abc import Coroutine
from statistics import median
from typing import Any

from agentfly import Environment, Pool, Task
from agentfly.resources import ResourceManager
from benchmarks.table import print_table

TASK = Task.of("Q")


class World(Environment):
    """Does nothing."""

    pool = Pool(max_instances=None)


class Other(Environment):
    """Does nothing either."""


async def managed(instances: int, rounds: int, *kinds: type[Environment]) -> float:
    """Microseconds for a lease and its release, with so many instances, all but one of them lent."""
    manager = ResourceManager({kind: Pool(max_instances=instances) for kind in kinds})
    held = [manager.leases(TASK, kinds) for _ in range(instances)]
    for leases in held:
        await leases.get(kinds[0])
    await held.pop().release()
    spent = []
    for _ in range(rounds):
        begun = time.perf_counter()
        async with manager.leases(TASK, kinds) as leases:
            await leases.get(kinds[0])
        spent.append(time.perf_counter() - begun)
    for leases in held:
        await leases.release()
    await manager.close()
    return median(spent) * 1e6


async def contended(instances: int, chains: int) -> float:
    """Microseconds of the process's time a chain, where four times as many chains as instances take turns."""
    manager = ResourceManager({World: Pool(max_instances=instances)})

    async def worker() -> None:
        for _ in range(chains // (4 * instances)):
            async with manager.leases(TASK, [World]) as leases:
                await leases.get(World)
                await asyncio.sleep(0)

    await asyncio.gather(*(worker() for _ in range(instances)))
    begun = time.process_time()
    await asyncio.gather(*(worker() for _ in range(4 * instances)))
    spent = time.process_time() - begun
    await manager.close()
    return spent / (chains // (4 * instances) * 4 * instances) * 1e6


async def queued(instances: int, rounds: int) -> float:
    """Microseconds to take an object out of a queue and put it back."""
    queue: asyncio.Queue[Environment] = asyncio.Queue()
    for _ in range(instances):
        queue.put_nowait(World())
    spent = []
    for _ in range(rounds):
        begun = time.perf_counter()
        world = await queue.get()
        await world.reset(TASK)
        queue.put_nowait(world)
        spent.append(time.perf_counter() - begun)
    return median(spent) * 1e6


def measured(instances: int, rounds: int, chains: int) -> list[Coroutine[Any, Any, float]]:
    return [
        managed(instances, rounds, World),
        managed(instances, rounds, World, Other),
        contended(instances, chains),
        queued(instances, rounds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, chains = (200, 2000) if quick else (5000, 40_000)
    sizes = (10, 100) if quick else (10, 100, 1000, 5000)
    rows = [list(map(asyncio.run, measured(size, rounds, chains))) for size in sizes]
    header = ["instances", "one kind", "two kinds at once", "contended, a chain", "asyncio.Queue"]
    print_table(
        "Lease, reset that does nothing, release of warm instances, µs (median)",
        header,
        [[f"{size:,}", *(f"{cost:.1f}" for cost in row)] for size, row in zip(sizes, rows, strict=True)],
    )


if __name__ == "__main__":
    main()
