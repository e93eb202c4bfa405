"""Time that a rollout loses to waiting: real runs compared with a simulated schedule of the same durations.

256 chains of 5 turns share 64 backend slots; generation and tools take lognormal times. The ideal is an event
simulation without overhead, first come, first served; the bound is a lower bound for every schedule.

    python -m benchmarks.schedule [--quick]
"""

import argparse
import asyncio
import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import mean, stdev

from benchmarks.simulation import POLICIES, Draws, Schedule, lock_step, simulate
from benchmarks.table import print_table

IDEAL = POLICIES["first come, first served"]


def run_agentfly(draws: Draws, *, blocking: bool) -> tuple[float, float]:
    """Wall and CPU seconds of a real rollout whose generation and tools sleep for the drawn durations."""
    from agentfly import tool
    from agentfly.backends.base import Request
    from agentfly.types import Completion
    from benchmarks.sides.agentfly_run import FakeBackend, agent_on, fake_model, rows

    class Server(FakeBackend):
        """A limited number of slots, first come, first served."""

        slots = asyncio.Semaphore(draws.slots)

        async def generate(self, request: Request) -> Completion:
            reply = self.model.reply(request.prompt)
            async with self.slots:
                await asyncio.sleep(draws.generation[reply.chain][reply.turn])
            return await super().generate(request)

    @tool(name="add")
    async def add_async(a: int, b: int) -> str:
        """Add two integers."""
        await asyncio.sleep(draws.tool[b % 1000][a % 1000])
        return str(a + b)

    @tool(name="add")
    def add_blocking(a: int, b: int) -> str:
        """Add two integers."""
        time.sleep(draws.tool[b % 1000][a % 1000])
        return str(a + b)

    agent = agent_on(Server(fake_model(draws.chains, draws.turns)), add_blocking if blocking else add_async)
    work = rows(draws.chains, draws.turns)

    async def run() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        result = await agent.run(work, max_turns=draws.turns, num_chains=1)
        wall = time.perf_counter() - start, time.process_time() - cpu
        assert sum(result.rewards) == draws.chains, "every chain should have earned 1"
        return wall

    return asyncio.run(run())


def compare(draws: Draws) -> Iterable[list[str]]:
    ideal = simulate(draws, IDEAL).wall

    def row(name: str, how: str, wall: float, cpu: float | None = None) -> list[str]:
        spent = "" if cpu is None else f"{cpu:.2f}"
        return [name, how, f"{wall:.2f}", f"{wall / ideal:.3f}", f"{wall / draws.bound:.3f}", spent]

    yield row("lower bound", "computed", draws.bound)
    yield row("ideal, first come, first served", "simulated", ideal)
    yield row("agentfly, asynchronous tools", "real clock", *run_agentfly(draws, blocking=False))
    yield row("agentfly, blocking tools", "real clock", *run_agentfly(draws, blocking=True))
    yield row("lock-step, tools in parallel", "simulated", lock_step(draws, tools_in_parallel=True).wall)
    yield row("lock-step, tools one by one", "simulated", lock_step(draws, tools_in_parallel=False).wall)


def policies(seeds: int) -> Iterable[list[str]]:
    """All scheduling policies on the same workloads, with equal chains and with fast and slow ones."""
    alike = [Draws(seed=seed) for seed in range(seeds)]
    paced = [Draws(seed=seed, generation_sigma=0.7, chain_sigma=0.7) for seed in range(seeds)]
    ideals = {id(draws): simulate(draws, IDEAL).wall for draws in alike + paced}

    def columns(workloads: list[Draws], schedule: Callable[[Draws], Schedule]) -> list[str]:
        results = [(draws, schedule(draws)) for draws in workloads]
        over = mean(result.wall / draws.bound for draws, result in results)
        gains = [result.wall / ideals[id(draws)] - 1 for draws, result in results]
        error = stdev(gains) / math.sqrt(len(gains))
        done = mean(result.mean_completion for _, result in results)
        return [f"{over:.3f}", f"{mean(gains):+.1%} ± {error:.1%}", f"{done:.2f}"]

    schedules: dict[str, Callable[[Draws], Schedule]] = {
        **{name: partial(simulate, policy=policy) for name, policy in POLICIES.items()},
        "lock-step, tools in parallel": partial(lock_step, tools_in_parallel=True),
        "lock-step, tools one by one": partial(lock_step, tools_in_parallel=False),
    }
    for name, schedule in schedules.items():
        yield [name, *columns(alike, schedule), *columns(paced, schedule)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time that a rollout loses to waiting.")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2], help="seeds of the real runs")
    parser.add_argument("--seeds", type=int, default=200, help="number of workloads per scheduling policy")
    options = parser.parse_args(arguments)

    for seed in options.seed[:1] if options.quick else options.seed:
        draws = Draws(seed, chains=32, slots=8) if options.quick else Draws(seed)
        print_table(
            f"{draws.chains} chains × {draws.turns} turns over {draws.slots} slots, seed {seed}",
            ["schedule", "how", "wall s", "/ ideal", "/ bound", "CPU s"],
            list(compare(draws)),
        )
    seeds = 3 if options.quick else options.seeds
    measures = ["wall / bound", "longer than FCFS", "mean completion s"]
    print_table(
        f"order of serving, {seeds} seeds, simulated; left: chains alike, right: each with its own pace",
        ["who is served first", *measures, *measures],
        list(policies(seeds)),
    )


if __name__ == "__main__":
    main()
