"""What every prebuilt world costs: steps and resets a second and memory, with 1, 16 and 64 instances at once.

Chains follow the world's expert through its own tasks, under the resource manager and through the tools, as a model
would act. Seconds are of the clock, since some worlds live in processes of their own; memory is that of this process
and its children beyond what one instance needs, so a world that shares what it can shows how little it adds.

    python -m benchmarks.worlds [WORLD ...] [--quick]
"""

import argparse
import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from agentfly import environments, threads
from agentfly.environment import Environment, Pool, has_tasks
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.resources import ResourceManager
from agentfly.tooling import Context, Toolbox
from agentfly.types import Task, ToolCall
from benchmarks.table import print_table

INSTANCES = (1, 16, 64)
MOST_STEPS = 60
HEADER = ["world", "instances", "steps/s", "resets/s", "MB for each more instance"]


def worlds() -> list[str]:
    """The prebuilt worlds that have tasks and an expert."""
    there = (getattr(environments, name) for name in environments.__all__)
    return [each.__name__ for each in there if has_tasks(each) and each.expert is not Environment.expert]


async def measure(kind: type[Environment], instances: int, seconds: float) -> tuple[float, float]:
    """Steps and resets a second."""
    manager = ResourceManager({kind: Pool(**{**_fields(kind.pool), "max_instances": instances, "min_warm": 0})})
    tasks = itertools.cycle([Task.of(row) for row in kind.draw_tasks("train", 32)])
    await asyncio.gather(*(chain(manager, kind, next(tasks), steps=1) for _ in range(instances)))  # all are started
    stepped = await repeated(manager, kind, tasks, instances, seconds, MOST_STEPS)
    reset = await repeated(manager, kind, tasks, instances, seconds / 2, 0)
    await manager.close()
    return stepped, reset


async def repeated(
    manager: ResourceManager, kind: type[Environment], tasks: Iterator[Task], instances: int, seconds: float, steps: int
) -> float:
    """How often a second: steps, or chains where they have none."""
    done, begun = 0, time.perf_counter()

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < begun + seconds:
            took = await chain(manager, kind, next(tasks), steps)
            done += took if steps else 1

    await asyncio.gather(*(worker() for _ in range(instances)))
    return done / (time.perf_counter() - begun)


async def chain(manager: ResourceManager, kind: type[Environment], task: Task, steps: int) -> int:
    """Follow the expert for at most so many steps; how many it took."""
    toolbox = Toolbox([kind])
    group = manager.group()
    try:
        async with manager.leases(task, [kind], group=group) as leases:
            await leases.get(kind)
            for step in range(steps):
                call = await leases.act([kind], lambda lent: threads.call(lent[kind].expert))
                if not isinstance(call, ToolCall):
                    return step
                tool = toolbox.find(call)
                result = await leases.act(
                    tool.environments,
                    lambda lent, tool=tool, call=call, step=step: tool.run(
                        call.arguments, context=Context(task, turn=step), environments=lent
                    ),
                )
                if result.ends_chain:
                    return step + 1
            return steps
    finally:
        group.close()


async def weighed(kind: type[Environment], instances: int) -> int:
    """Bytes of this process and its children while so many are lent, each one step into its task."""
    manager = ResourceManager({kind: Pool(**{**_fields(kind.pool), "max_instances": instances, "min_warm": 0})})
    tasks = [Task.of(row) for row in kind.draw_tasks("train", instances)]
    held = [manager.leases(task, [kind]) for task in tasks]
    for leases in held:
        await leases.get(kind)
        await leases.act([kind], lambda lent: threads.call(lent[kind].expert))
    size = sum(map(_proportional, _family()))
    for leases in held:
        await leases.release()
    await manager.close()
    return size


def _fields(pool: Pool) -> dict[str, object]:
    return {name: getattr(pool, name) for name in Pool.__dataclass_fields__}


def _family() -> Iterator[int]:
    """This process and all below it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(after[1]), []).append(int(stat.parent.name))
    found = [int(Path("/proc/self").resolve().name)]
    for each in found:
        found += parents.get(each, [])
    return iter(found)


def _proportional(process: int) -> int:
    """Bytes of a process, its part of what it shares with others counted as a part."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def row(name: str, instances: int, seconds: float) -> list[str]:
    """The figures of one world with so many instances. Memory is taken in fresh processes."""
    steps, resets = asyncio.run(measure(getattr(environments, name), instances, seconds))
    more = ""
    if instances > 1:
        one, many = (_weighed_apart(name, count) for count in (1, instances))
        more = f"{(many - one) / (instances - 1) / 2**20:.2f}"
    return [name, str(instances), f"{steps:,.0f}", f"{resets:,.0f}", more]


def _weighed_apart(name: str, instances: int) -> int:
    command = [sys.executable, "-m", "benchmarks.worlds", name, "--weigh", str(instances)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", metavar="WORLD", help=f"of {', '.join(worlds())}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--weigh", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.weigh:
        print(asyncio.run(weighed(getattr(environments, asked.worlds[0]), asked.weigh)))
        return
    sizes, seconds = ((1, 4), 0.5) if asked.quick else (INSTANCES, 5.0)
    rows = []
    for name in asked.worlds or worlds():
        for instances in sizes:
            try:
                rows.append(row(name, instances, seconds))
            except (ConfigError, EnvironmentFault) as error:
                print(f"{name} is left out: {describe(error):.200}", flush=True)
                break
            print("|", " | ".join(rows[-1]), "|", flush=True)
    print_table("Worlds under the resource manager, following their experts", HEADER, rows)


if __name__ == "__main__":
    main()
