"""Overhead of the resource manager: acquiring and releasing a warm instance, by the number of instances.

All instances are warm and the environment does nothing, so all time is the manager's. An `asyncio.Queue` of the same
objects is the lower bound for any pool in an event loop.

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
from agentfly.rollout.scheduler import infrequent_gc
from benchmarks.table import print_table

TASK = Task.of("Q")


class NoOp(Environment):
    """Does nothing."""

    pool = Pool(max_instances=None)


class OtherNoOp(Environment):
    """Does nothing."""


async def measure_lease(instances: int, rounds: int, *env_classes: type[Environment]) -> float:
    """Microseconds to acquire and release an instance when all others are leased."""
    manager = ResourceManager({cls: Pool(max_instances=instances) for cls in env_classes})
    held = [manager.leases(TASK, env_classes) for _ in range(instances)]
    for leases in held:
        await leases.get(env_classes[0])
    await held.pop().release()
    spent = []
    for _ in range(rounds):
        started = time.perf_counter()
        async with manager.leases(TASK, env_classes) as leases:
            await leases.get(env_classes[0])
        spent.append(time.perf_counter() - started)
    for leases in held:
        await leases.release()
    await manager.close()
    return median(spent) * 1e6


async def measure_contention(instances: int, chains: int) -> float:
    """CPU microseconds per chain with four concurrent chains per instance."""
    manager = ResourceManager({NoOp: Pool(max_instances=instances)})

    async def worker() -> None:
        for _ in range(chains // (4 * instances)):
            async with manager.leases(TASK, [NoOp]) as leases:
                await leases.get(NoOp)
                await asyncio.sleep(0)

    await asyncio.gather(*(worker() for _ in range(instances)))
    started = time.process_time()
    await asyncio.gather(*(worker() for _ in range(4 * instances)))
    spent = time.process_time() - started
    await manager.close()
    return spent / (chains // (4 * instances) * 4 * instances) * 1e6


async def measure_queue(instances: int, rounds: int) -> float:
    """Microseconds to get an object from a queue and put it back."""
    queue: asyncio.Queue[Environment] = asyncio.Queue()
    for _ in range(instances):
        queue.put_nowait(NoOp())
    spent = []
    for _ in range(rounds):
        started = time.perf_counter()
        environment = await queue.get()
        await environment.reset(TASK)
        queue.put_nowait(environment)
        spent.append(time.perf_counter() - started)
    return median(spent) * 1e6


async def measure_contention_in_rollout(instances: int, chains: int) -> float:
    """`measure_contention` with the garbage collector's threshold of a rollout."""
    with infrequent_gc:
        return await measure_contention(instances, chains)


def measure(instances: int, rounds: int, chains: int) -> list[Coroutine[Any, Any, float]]:
    return [
        measure_lease(instances, rounds, NoOp),
        measure_lease(instances, rounds, NoOp, OtherNoOp),
        measure_contention(instances, chains),
        measure_queue(instances, rounds),
        measure_contention_in_rollout(instances, chains),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, chains = (200, 2000) if quick else (5000, 40_000)
    sizes = (10, 100) if quick else (10, 100, 1000, 5000)
    rows = [list(map(asyncio.run, measure(size, rounds, chains))) for size in sizes]
    header = [
        "instances",
        "one class",
        "two classes at once",
        "contended, per chain",
        "asyncio.Queue",
        "contended, in a rollout",
    ]
    print_table(
        "Lease, reset that does nothing, release of warm instances, µs (median)",
        header,
        [[f"{size:,}", *(f"{cost:.1f}" for cost in row)] for size, row in zip(sizes, rows, strict=True)],
    )


if __name__ == "__main__":
    main()
