"""Steps and resets per second and memory of the prebuilt environments, with 1, 16 and 64 instances.

Chains follow the environment's expert through its own tasks, with the resource manager and the tools. Times are wall
time, since some environments run in their own processes; memory is that of this process and its children, per instance
beyond the first, so that shared memory is not counted.

    python -m benchmarks.environments [ENVIRONMENT ...] [--quick]
"""

import argparse
import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

from agentfly import environments, threads
from agentfly.environment import Environment, has_tasks
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.resources import ResourceManager
from agentfly.tooling import Context, Toolbox
from agentfly.types import Task, ToolCall
from benchmarks.table import print_table

INSTANCES = (1, 16, 64)
MAX_STEPS = 60
HEADER = ["environment", "instances", "steps/s", "resets/s", "MB per further instance"]


def list_environments() -> list[str]:
    """The prebuilt environments that have tasks and an expert."""
    classes = (getattr(environments, name) for name in dir(environments))
    return [
        env_class.__name__
        for env_class in classes
        if has_tasks(env_class) and env_class.expert is not Environment.expert
    ]


async def measure(env_class: type[Environment], instances: int, seconds: float) -> tuple[float, float]:
    """Steps and resets per second."""
    manager = ResourceManager({env_class: replace(env_class.pool, max_instances=instances, min_warm=0)})
    tasks = itertools.cycle([Task.of(row) for row in env_class.draw_tasks("train", 32)])
    # Start all instances.
    await asyncio.gather(*(chain(manager, env_class, next(tasks), steps=1) for _ in range(instances)))
    stepped = await measure_rate(manager, env_class, tasks, instances, seconds, MAX_STEPS)
    reset = await measure_rate(manager, env_class, tasks, instances, seconds / 2, 0)
    await manager.close()
    return stepped, reset


async def measure_rate(
    manager: ResourceManager,
    env_class: type[Environment],
    tasks: Iterator[Task],
    instances: int,
    seconds: float,
    steps: int,
) -> float:
    """Steps per second, or chains per second if `steps` is 0."""
    done, started = 0, time.perf_counter()

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < started + seconds:
            took = await chain(manager, env_class, next(tasks), steps)
            done += took if steps else 1

    await asyncio.gather(*(worker() for _ in range(instances)))
    return done / (time.perf_counter() - started)


@cache
def build_toolbox(env_class: type[Environment]) -> Toolbox:
    """The tools of an environment, built once, as an agent does it."""
    return Toolbox([env_class])


async def chain(manager: ResourceManager, env_class: type[Environment], task: Task, steps: int) -> int:
    """Follow the expert for at most `steps` steps; return their number."""
    toolbox = build_toolbox(env_class)
    group = manager.group()
    try:
        async with manager.leases(task, [env_class], group=group) as leases:
            await leases.get(env_class)
            for step in range(steps):
                call = await leases.act([env_class], lambda envs: threads.call(envs[env_class].expert))
                if not isinstance(call, ToolCall):
                    return step
                tool = toolbox.find(call)
                result = await leases.act(
                    tool.environments,
                    lambda envs, tool=tool, call=call, step=step: tool.run(
                        call.arguments, context=Context(task, turn=step), environments=envs
                    ),
                )
                if result.ends_chain:
                    return step + 1
            return steps
    finally:
        group.close()


async def measure_memory(env_class: type[Environment], instances: int) -> int:
    """Bytes of this process and its children while all instances are leased, each after one step."""
    manager = ResourceManager({env_class: replace(env_class.pool, max_instances=instances, min_warm=0)})
    tasks = [Task.of(row) for row in env_class.draw_tasks("train", instances)]
    held = [manager.leases(task, [env_class]) for task in tasks]
    for leases in held:
        await leases.get(env_class)
        await leases.act([env_class], lambda envs: threads.call(envs[env_class].expert))
    size = sum(map(_pss, _process_tree()))
    for leases in held:
        await leases.release()
    await manager.close()
    return size


def _process_tree() -> Iterator[int]:
    """This process and its descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(after[1]), []).append(int(stat.parent.name))
    pids = [int(Path("/proc/self").resolve().name)]
    for pid in pids:
        pids += parents.get(pid, [])
    return iter(pids)


def _pss(process: int) -> int:
    """Proportional set size of a process in bytes."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def row(name: str, instances: int, seconds: float) -> list[str]:
    """The figures of one environment. Memory is measured in new processes."""
    steps, resets = asyncio.run(measure(getattr(environments, name), instances, seconds))
    more = ""
    if instances > 1:
        one, many = (_measure_memory_in_new_process(name, count) for count in (1, instances))
        more = f"{(many - one) / (instances - 1) / 2**20:.2f}"
    return [name, str(instances), f"{steps:,.0f}", f"{resets:,.0f}", more]


def _measure_memory_in_new_process(name: str, instances: int) -> int:
    command = [sys.executable, "-m", "benchmarks.environments", name, "--weigh", str(instances)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=f"of {', '.join(list_environments())}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--weigh", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.weigh:
        print(asyncio.run(measure_memory(getattr(environments, options.names[0]), options.weigh)))
        return
    sizes, seconds = ((1, 4), 0.5) if options.quick else (INSTANCES, 5.0)
    rows = []
    for name in options.names or list_environments():
        for instances in sizes:
            try:
                rows.append(row(name, instances, seconds))
            except (ConfigError, EnvironmentFault) as error:
                print(f"{name} is skipped: {describe(error):.200}", flush=True)
                break
            print("|", " | ".join(rows[-1]), "|", flush=True)
    print_table("Environments with the resource manager and their experts", HEADER, rows)


if __name__ == "__main__":
    main()
