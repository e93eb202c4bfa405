"""Agents whose contexts outgrow the engine's cache: what is computed again, with and without host memory.

Random weights of a published shape. The cache has room for `--fits` chains at their full length. Chains run at once,
each turn shows an observation and samples a reply, so that the prefix of a waiting chain is evicted where there are
more. "computed" is the tokens of all forward passes over those that each chain has in the end: 1.0 computes nothing
twice.

    python -m benchmarks.eviction [--shape qwen2.5-3b] [--fits 16] [--chains 16,32,64] [--turns 30]
"""

import argparse
import asyncio
import random
import time
from typing import Any

import torch

from agentfly.backends.base import Request
from agentfly.backends.engine import EngineBackend
from agentfly.backends.engine.model_runner import bytes_per_token
from agentfly.types import Sampling
from benchmarks.engine_gpu import Chain, agents
from benchmarks.shapes import SHAPES, build_model
from benchmarks.table import print_table

SPARE = 512
"""Slots beside those of the chains: a request gets some ahead of its tokens."""


def measure(model: Any, chains: list[Chain], *, kv_memory: int, host_memory: int | None) -> tuple[float, float]:
    """Sampled tokens a second, and the tokens of all forward passes over those of the chains."""
    backend = EngineBackend(model, kv_memory=kv_memory, host_memory=host_memory)
    runner = backend._runner
    launch, computed = runner.launch, [0]

    def count(batch: Any) -> Any:
        computed[0] += int(batch.counts.sum())
        return launch(batch)

    runner.launch = count  # type: ignore[method-assign]

    async def run(number: int, chain: Chain) -> int:
        history = list(chain.prompt)
        sampled = 0
        for turn, (tokens, observed) in enumerate(chain.turns):
            request = Request(history, Sampling(max_tokens=tokens, seed=turn), chain=str(number), turn=turn)
            completion = await backend.generate(request)
            history = [*history, *completion.token_ids, *observed]
            sampled += len(completion.token_ids)
        return sampled

    async def run_all() -> tuple[int, float]:
        await backend.generate(Request([5, 6, 7, 8], Sampling(max_tokens=2)))  # starts the engine
        computed[0] = 0
        started = time.perf_counter()
        sampled = sum(await asyncio.gather(*(run(number, chain) for number, chain in enumerate(chains))))
        seconds = time.perf_counter() - started
        await backend.close()
        return sampled, seconds

    sampled, seconds = asyncio.run(run_all())
    total = sum(
        len(chain.prompt) + sum(tokens + len(observed) for tokens, observed in chain.turns) - len(chain.turns[-1][1])
        for chain in chains
    )
    return sampled / seconds, computed[0] / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b" if gpu else "test")
    parser.add_argument("--fits", type=int, default=16 if gpu else 4)
    parser.add_argument("--chains", default="16,32,64" if gpu else "4,8,16")
    parser.add_argument("--turns", type=int, default=30 if gpu else 10)
    parser.add_argument("--shown", type=int, default=1000 if gpu else 60)
    parser.add_argument("--sampled", type=int, default=150 if gpu else 12)
    parser.add_argument("--quick", action="store_true", help="two turns; the figures are not meaningful")
    options = parser.parse_args()
    turns = 2 if options.quick else options.turns
    length = options.shown + turns * (options.shown + options.sampled)
    dtype = torch.bfloat16 if gpu else torch.float32
    model = build_model(options.shape, "cuda" if gpu else "cpu", dtype, context=length + SPARE)
    token = bytes_per_token(model)
    kv_memory = (options.fits * length + SPARE) * token
    rows = []
    for count in map(int, options.chains.split(",")):
        for host_memory in (None, count * length * token):
            if host_memory is not None and count <= options.fits:
                continue
            chains = agents(
                random.Random(count), model.config.vocab_size, count, options.shown, turns,
                (options.sampled, options.sampled), options.shown,
            )  # fmt: skip
            rate, computed = measure(model, chains, kv_memory=kv_memory, host_memory=host_memory)
            host = "" if host_memory is None else f"{host_memory / 2**30:.2f}"
            rows.append([str(count), host, f"{rate:,.0f}", f"{computed:.2f}"])
            print(*rows[-1], flush=True)
    title = f"{options.shape}, {turns} turns of {options.shown} + {options.sampled}: {options.fits} chains fit"
    print_table(title, ["chains", "host memory, GiB", "sampled tokens a second", "computed"], rows)


if __name__ == "__main__":
    main()
