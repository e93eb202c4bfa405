"""Cost of a turn and memory of a token in long chains, with a model that answers at once.

Chains run concurrently, one tool call per turn. The CPU time of the process is read when the turns of all chains reach
each tenth of the run, and memory when the chains have ended: the whole process, without what it took before.

Then the chains are written as a step of a run, and new processes resume the run, index it and show a chain of it as
`agentfly view` does. Of each, the CPU time and the largest memory are measured.

    python -m benchmarks.long_chains [--chains 1000] [--turns 200] [--tokens 64000]
"""

import argparse
import asyncio
import ctypes
import gc
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np

from agentfly import reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend, ScriptedTurn
from agentfly.runs import RunWriter, StepRecord
from agentfly.trajectory import Trajectory
from agentfly.view.chains import Tokenizers, show_chain
from agentfly.view.index import ChainIndex
from agentfly.view.sources import find_sources
from benchmarks.memory import MIB, resident
from benchmarks.sides.serve import TOKENIZER
from benchmarks.table import print_table

WINDOWS = 10
"""Parts of a run whose cost is reported separately."""


@reward
async def done(prediction: str) -> float:
    return float(prediction == "done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64_000, help="of one chain, roughly")
    parser.add_argument("--quick", action="store_true", help="20 chains; the figures are not meaningful")
    options = parser.parse_args()
    chains, turns = 20 if options.quick else options.chains, options.turns
    random = Random(0)
    words = [f"{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{i % 10}" for i in range(500)]
    observation_words = max(options.tokens // turns - 80, 8) * 3 // 5

    @tool
    async def read(page: int) -> str:
        """Read a page."""
        return " ".join(random.choices(words, k=observation_words))

    seconds: list[float] = []
    calls = 0

    def script(turn: ScriptedTurn) -> str:
        nonlocal calls
        if calls % (chains * turns // WINDOWS) == 0:
            seconds.append(time.process_time())
        calls += 1
        if turn.turn == turns - 1:
            return "done"
        call = {"name": "read", "arguments": {"page": turn.turn}}
        return f"I read page {turn.turn} now.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"

    agent = HFAgent(
        str(TOKENIZER), tools=[read], reward=done, template="qwen2.5", backend=ScriptedBackend(script), on_no_call="end"
    )
    agent.run_sync("Warm up.", max_turns=1)
    seconds.clear()
    calls = 0
    ctypes.CDLL(None).malloc_trim(0)
    before = resident()
    result = asyncio.run(agent.run([{"question": f"Task {i}"} for i in range(chains)], max_turns=turns, num_chains=1))
    seconds.append(time.process_time())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    memory = resident() - before
    assert sum(result.rewards) == chains
    tokens = sum(len(segment) for chain in result for segment in chain.segments)
    windows = [(end - start) / (chains * turns / WINDOWS) * 1e6 for start, end in pairwise(seconds)]
    ends = [turns * (i + 1) // WINDOWS for i in range(WINDOWS)]
    print_table(
        f"{chains} chains of {turns} turns and {tokens // chains} tokens",
        ["turns up to", "CPU µs per turn", "ratio"],
        [[str(end), f"{cost:.0f}", f"{cost / windows[0]:.2f}"] for end, cost in zip(ends, windows, strict=True)],
    )
    print(f"{memory:.0f} MiB: {memory * MIB / tokens:.1f} bytes per token")
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure_run(Path(scratch), list(result.trajectories))
    print_table("The chains as a step of a run", ["what", "CPU s", "MiB more at most"], rows)


def measure_run(scratch: Path, chains: list[Trajectory]) -> list[list[str]]:
    """Write, resume, index and show the chains: name, CPU seconds and MiB of each."""
    folder = scratch / "run"
    advantages = {chain.id: [np.zeros(len(segment), np.float32) for segment in chain.segments] for chain in chains}
    with RunWriter.create(folder, {"model": str(TOKENIZER), "steps": 1}) as run:
        written = _measure(lambda: run.write_trajectories(1, chains, advantages))
        run.append(StepRecord(1, 1, {"chains": len(chains)}))
    size = run.trajectory_file(1).stat().st_size / MIB
    rows = [[f"written: {size:.0f} MiB of gzip", *written]]
    for name, function in (("resumed", _resume), ("indexed", _index), ("last chain of the list shown", _show)):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            rows.append([name, *pool.submit(_measure, function, folder, scratch / "cache").result()])
    return rows


def _measure(function: Callable[..., object], *arguments: Path) -> tuple[str, str]:
    """CPU seconds of a call, and by how many MiB the largest memory of the process grew."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the memory of now
    before = resident()
    started = time.process_time()
    function(*arguments)
    seconds = time.process_time() - started
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return f"{seconds:.1f}", f"{int(status['VmHWM'].split()[0]) / 1024 - before:.0f}"


def _resume(folder: Path, _: Path) -> None:
    RunWriter.resume(folder, 1).close()


def _index(folder: Path, cache: Path) -> None:
    with ChainIndex(find_sources([folder]), cache) as index:
        index.update()


def _show(folder: Path, cache: Path) -> None:
    with ChainIndex(find_sources([folder]), cache) as index:
        _, rows = index.select({}, descending=True, limit=1)
        show_chain(index, rows[0]["id"], Tokenizers())


if __name__ == "__main__":
    main()
