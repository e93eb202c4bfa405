"""Memory of finished and of running chains.

Each figure is measured in a new process. For finished chains: the memory that tracemalloc reports after the rollout,
when only its result is referenced. For running chains: the RSS while every chain waits for its last turn.

    python -m benchmarks.memory [--quick]
"""

import argparse
import asyncio
import gc
import resource
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.sides import floor
from benchmarks.sides.serve import Case
from benchmarks.table import print_table

MIB = 2**20
SIDES = ("floor", "agentfly")


def prepare(side: str, chains: int, turns: int) -> Case:
    if side == "floor":
        return floor.prepare(chains, turns)
    from benchmarks.sides import agentfly_run

    return agentfly_run.prepare(chains, turns)


def memory_per_chain(case: Case, chains: int) -> tuple[float, float]:
    """Bytes per finished chain, and tokens per chain."""
    case.run()  # fills caches whose size does not depend on the number of chains
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    result = case.run()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / chains, case.inspect(result).tokens / chains


def memory_of_side(side: str, chains: int, turns: int) -> tuple[float, float]:
    return memory_per_chain(prepare(side, chains, turns), chains)


def memory_with_long_answer(chains: int, tokens: int) -> tuple[float, float]:
    """The same for chains of five turns whose last reply extends them to `tokens` tokens."""
    from agentfly.backends.base import Request
    from agentfly.types import Completion, FinishReason
    from benchmarks.sides.agentfly_run import FakeBackend, agent_on, fake_model, inspect, rows

    class LongAnswer(FakeBackend):
        async def generate(self, request: Request) -> Completion:
            reply = self.model.reply(request.prompt)
            if reply.turn < 4:
                return await super().generate(request)
            *words, close = reply.ids
            ids = [*words, *words[:1] * (tokens - len(request.prompt) - len(reply.ids)), close]
            return Completion(ids, [-0.25] * len(ids), [0] * len(ids), FinishReason.STOP)

    agent, work = agent_on(LongAnswer(fake_model(chains, 5))), rows(chains, 5)
    return memory_per_chain(Case(lambda: asyncio.run(agent.run(work, max_turns=5)), inspect), chains)


def rss_of_live_chains(chains: int, turns: int) -> tuple[float, float]:
    """MiB of the process while every chain waits in its last turn, and the part that the chains added."""
    from agentfly.backends.base import Request
    from agentfly.types import Completion
    from benchmarks.sides.agentfly_run import FakeBackend, agent_on, fake_model, rows

    class Gate(FakeBackend):
        """Blocks the last turn of every chain until all chains have reached it."""

        waiting, rss, open = 0, 0.0, asyncio.Event()

        async def generate(self, request: Request) -> Completion:
            if self.model.reply(request.prompt).turn == turns - 1:
                self.waiting += 1
                if self.waiting == chains:
                    self.rss = resident()
                    self.open.set()
                await self.open.wait()
            return await super().generate(request)

    gate = Gate(fake_model(chains, turns))
    agent, work = agent_on(gate), rows(chains, turns)
    before = resident()
    result = asyncio.run(agent.run(work, max_turns=turns, num_chains=1))
    assert sum(result.rewards) == chains, "every chain should have earned 1"
    return gate.rss, gate.rss - before


def resident() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def in_new_process(function: Callable[..., tuple[float, float]], *arguments: Any) -> tuple[float, float]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Memory of finished and of running chains.")
    parser.add_argument("--quick", action="store_true", help="a smoke run; the figures are not meaningful")
    options = parser.parse_args(arguments)
    several, many = (20, 200) if options.quick else (200, 10_000)

    def row(side: str, what: str, held: float, tokens: float) -> list[str]:
        return [side, what, f"{tokens:.0f}", f"{held / 1000:.1f}", f"{held / tokens:.1f}"]

    rows = [
        *(row(side, "5 turns", *in_new_process(memory_of_side, side, several, 5)) for side in SIDES),
        *(row(side, "75 turns", *in_new_process(memory_of_side, side, several, 75)) for side in SIDES),
        row("agentfly", "5 turns, long answer", *in_new_process(memory_with_long_answer, several, 4096)),
    ]
    print_table("Memory of a finished chain", ["side", "chain", "tokens", "KB", "bytes per token"], rows)

    whole, added = in_new_process(rss_of_live_chains, many, 5)
    print_table(
        "RSS while all chains wait in the backend",
        ["side", "chains", "process MiB", "chains MiB", "KB per chain"],
        [["agentfly", f"{many:,}", f"{whole:.0f}", f"{added:.0f}", f"{added * MIB / many / 1000:.1f}"]],
    )


if __name__ == "__main__":
    main()
