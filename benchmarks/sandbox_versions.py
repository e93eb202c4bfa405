"""Sandbox calls and environment resets of this version, side by side with another one (a git worktree).

python -m benchmarks.sandbox_versions ../before/src [--quick]
"""

import argparse
import asyncio
import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentfly import environments
from agentfly.resources import ResourceManager
from agentfly.sandbox import Session, open_sandbox
from agentfly.threads import call
from agentfly.types import Task
from benchmarks.environments import measure_rate
from benchmarks.sandbox import CODE, RESET_BY_SESSION, closed_loop
from benchmarks.table import print_table


async def serve_slices() -> None:
    """Measure what the lines of stdin ask for (`NAME INSTANCES SECONDS`), and print the number and the seconds."""
    sessions: list[Session] = []
    prepared: dict[tuple[str, int], tuple[Any, ...]] = {}
    while line := await call(sys.stdin.readline):
        name, instances, seconds = line.split()
        key = name, int(instances)
        started = time.perf_counter()
        if name == "calls":
            if not sessions:
                sandbox = await open_sandbox(preload=())
                sessions += [await sandbox.open_session() for _ in range(key[1])]
            started = time.perf_counter()
            callers = [lambda session=session: session.run(CODE) for session in sessions]
            rate, _ = await closed_loop(callers, int(float(seconds) * 3000))
        else:
            env_class = getattr(environments, name)
            if key not in prepared:
                pool = replace(env_class.pool, max_instances=key[1], min_warm=0)
                tasks = itertools.cycle([Task.of(row) for row in env_class.draw_tasks("train", 32)])
                prepared[key] = ResourceManager({env_class: pool}), env_class, tasks
            started = time.perf_counter()
            rate = await measure_rate(*prepared[key], key[1], seconds=float(seconds), steps=0)
        elapsed = time.perf_counter() - started
        print(rate * elapsed, elapsed, flush=True)


def compare(source: str, rounds: int) -> None:
    """Let this version and another one work in turns of a second, so that the load of the machine hits both."""
    versions = {}
    for label, path in (("before", source), ("now", str(Path(__file__).resolve().parents[1] / "src"))):
        command = [sys.executable, "-m", "benchmarks.sandbox_versions", "--slices"]
        variables = {**os.environ, "PYTHONPATH": path}
        versions[label] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
    rows = []
    for name, instances in (("calls", 16), *itertools.product(RESET_BY_SESSION, (1, 16))):
        totals = {label: [0.0, 0.0] for label in versions}
        for turn in range(rounds + 1):
            for label, process in versions.items():
                process.stdin.write(f"{name} {instances} {1.0 if turn else 0.2}\n")
                process.stdin.flush()
                number, seconds = map(float, process.stdout.readline().split())
                if turn:  # the first one warms up
                    totals[label] = [totals[label][0] + number, totals[label][1] + seconds]
        before, now = (number / seconds for number, seconds in totals.values())
        rows.append([name, str(instances), f"{before:.0f}", f"{now:.0f}", f"{now / before:.2f}"])
    for process in versions.values():
        process.stdin.close()
        process.wait()
    header = ["calls, or resets of", "at once", "before, per second", "now, per second", "ratio"]
    print_table(f"Two versions in turns, load {os.getloadavg()[0]:.1f}", header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", nargs="?", help="folder that the other version is imported from")
    parser.add_argument("--quick", action="store_true", help="one round instead of four")
    parser.add_argument("--slices", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.slices:
        asyncio.run(serve_slices())
    elif options.source:
        compare(options.source, 1 if options.quick else 4)
    else:
        parser.error("give the folder of the other version, such as ../before/src")
