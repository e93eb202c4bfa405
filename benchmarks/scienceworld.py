"""ScienceWorld: our steps compared with the package's `env.step`, and many instances with the resource manager.

    python -m benchmarks.scienceworld [--quick]

Both execute the same solutions of the same variations. Times are wall time; CPU time is that of this process and its
Java processes, memory that of the Java processes, both from /proc.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly.environments import ScienceWorld
from agentfly.environments.scienceworld import jvm
from agentfly.environments.scienceworld.tasks import read_variation
from agentfly.errors import ConfigError
from agentfly.resources import ResourceManager
from agentfly.types import Task
from benchmarks.table import print_table

INSTANCES = (1, 16, 64)
TASKS = ["boil", "find-plant", "find-animal", "use-thermometer", "identify-life-stages-1", "power-component"]


def solutions(count: int) -> list[tuple[Task, list[str]]]:
    """Tasks with the actions that solve them."""
    tasks = [Task.of(row) for row in ScienceWorld.draw_tasks("train", count, tasks=TASKS)]
    process = jvm.reserve(1)
    paths = [process.call_scratch(read_variation(task).find_gold_path) for task in tasks]
    jvm.release(process)
    return list(zip(tasks, paths, strict=True))


def upstream(solved: list[tuple[Task, list[str]]]) -> list[str]:
    """The package's own environment, one instance."""
    from scienceworld import ScienceWorldEnv

    environment = ScienceWorldEnv()

    def begin(task: Task) -> None:
        variation = read_variation(task)
        environment.load(variation.task, variation.number, variation.simplification)

    def step(action: str) -> Any:
        return environment.step(action)

    return ["package's env.step", *_measure(solved, begin, step, [environment._gateway.java_process.pid])]


def ours(solved: list[tuple[Task, list[str]]]) -> list[str]:
    """One simulator, called like our environment calls it."""
    process = jvm.reserve(1)
    simulator = process.create_simulator()

    def begin(task: Task) -> None:
        process.call(lambda: read_variation(task).load(simulator))

    def step(action: str) -> Any:
        return process.call(lambda: jvm.take_step(simulator, action))

    row = _measure(solved, begin, step, jvm.list_pids())
    jvm.release(process)
    return ["ours", *row]


def _measure(
    solved: list[tuple[Task, list[str]]],
    begin: Callable[[Task], None],
    step: Callable[[str], Any],
    java_pids: list[int],
) -> list[str]:
    begin(solved[0][0])
    step("look around")
    resetting = stepping = 0.0
    spent = cpu_seconds(java_pids)
    for task, actions in solved:
        started = time.perf_counter()
        begin(task)
        loaded = time.perf_counter()
        for action in actions:
            step(action)
        stepping += time.perf_counter() - loaded
        resetting += loaded - started
    steps = sum(len(actions) for _, actions in solved)
    spent = (cpu_seconds(java_pids) - spent) / (steps + len(solved))
    cells = (1000 * resetting / len(solved), 1000 * stepping / steps, 1000 * spent)
    return [*(f"{cell:.1f}" for cell in cells), f"{steps / stepping:.1f}", f"{resident(java_pids):.0f}", str(steps)]


def cpu_seconds(java_pids: list[int]) -> float:
    """CPU seconds of this process and the Java processes so far."""
    return sum(_ticks(pid) for pid in (os.getpid(), *java_pids)) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after[11]) + int(after[12])


def resident(pids: list[int]) -> float:
    """Resident megabytes of the processes."""
    texts = (Path(f"/proc/{pid}/status").read_text() for pid in pids)
    return sum(int(text.partition("VmRSS:")[2].split()[0]) for text in texts) / 1024


async def measure_managed(instances: int, solved: list[tuple[Task, list[str]]], seconds: float) -> list[str]:
    """Execute solutions with leased instances."""
    manager = ResourceManager({ScienceWorld: replace(ScienceWorld.pool, max_instances=instances)})
    steps = chains = 0
    deadline = float("inf")

    async def chain(task: Task, actions: list[str], ready: asyncio.Barrier | None = None) -> None:
        nonlocal steps, chains
        async with manager.leases(task, [ScienceWorld]) as leases:
            world = await leases.get(ScienceWorld)
            if ready:  # only start the instance
                await ready.wait()
                return
            for action in actions:
                if time.perf_counter() > deadline:
                    return
                await world.scienceworld_step(action)
                steps += 1
            chains += 1

    async def worker(number: int) -> None:
        while time.perf_counter() < deadline:
            await chain(*solved[number % len(solved)])
            number += instances

    barrier = asyncio.Barrier(instances)
    await asyncio.gather(*(chain(*solved[number % len(solved)], barrier) for number in range(instances)))
    java_pids = jvm.list_pids()
    spent, started = cpu_seconds(java_pids), time.perf_counter()
    deadline = started + seconds
    await asyncio.gather(*map(worker, range(instances)))
    took, spent = time.perf_counter() - started, cpu_seconds(java_pids) - spent
    memory = resident(java_pids)
    await manager.close()
    rates = [f"{steps / took:.0f}", f"{chains / took:.2f}", f"{1000 * spent / steps:.1f}"]
    return [str(instances), str(len(java_pids)), *rates, f"{memory:.0f}", f"{memory / instances:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    try:
        solved = solutions(6 if quick else 24)
    except ConfigError as error:
        print(f"not measured: {error}")
        return
    header = [
        "one instance",
        "ms per reset",
        "ms per step",
        "CPU-ms per step or reset",
        "steps/s",
        "MB of Java",
        "steps measured",
    ]
    few = solved[: 2 if quick else 6]
    print_table("ScienceWorld, the same solutions", header, [ours(few), upstream(few)])
    rows = [
        asyncio.run(measure_managed(instances, solved, 3 if quick else 15))
        for instances in ((1, 4) if quick else INSTANCES)
    ]
    header = ["instances", "Java processes", "steps/s", "chains/s", "CPU-ms per step", "MB of Java", "MB per instance"]
    print_table("With the resource manager, including resets", header, rows)


if __name__ == "__main__":
    main()
