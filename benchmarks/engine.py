"""Throughput of the embedded engine on a CPU, compared with transformers' own batching and vLLM.

All engines sample the same prompts to the same lengths, with log-probabilities, in float32 on `--threads` threads.
Rounds are interleaved. Besides tokens per second of wall time, which other processes on the machine disturb, tokens per
second of CPU time are reported. vLLM's processes spin while they wait: its CPU time means little unless everything is
pinned to the same cores (`taskset`).
vLLM runs in the environment of `make vllm`, and is skipped if there is none. With several threads, skip transformers'
batching (`--sides vLLM`): its thread keeps OpenMP's helper threads, which slows the others down. The side `torch` is
this engine without its native attention.

    python -m benchmarks.engine [--model smollm2-135m] [--threads 1] [--sides transformers vLLM torch] [--only 8 32 …]
        [--rounds 3] [--max-tokens 48] [--quick]
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from agentfly.backends.base import Request
from agentfly.backends.engine import EngineBackend
from agentfly.backends.engine.attention import DenseAttention
from agentfly.models import resolve
from agentfly.types import Sampling
from benchmarks.table import print_table

ROOT = Path(__file__).resolve().parents[1]
VLLM = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
SIDES = ("transformers", "vLLM", "torch")
VOCABULARY = 400
"""Token ids below this exist in every model."""
MEMORY = 2 << 30
OBSERVATION = 100
TOOL_PROMPT_TOKENS = 200
"""Tokens of a system prompt that describes tools."""
GAP = 0.05
"""Default seconds between two requests."""


@dataclass(frozen=True)
class Turn:
    """A request and its arrival time."""

    prompt: list[int]
    count: int
    at: float


@dataclass(frozen=True)
class Cost:
    """Tokens sampled, and the time they took."""

    tokens: int
    wall: float
    process: float

    @property
    def rates(self) -> tuple[float, float]:
        return self.tokens / self.wall, self.tokens / self.process


Side = Callable[[Sequence[Turn]], Awaitable[int | tuple[int, float]]]
"""Samples turns as they arrive; returns the number of tokens, and the CPU seconds of another process, if any."""


def draw_requests(
    count: int, most: int, seed: int, prompts: tuple[int, int] = (20, 120), gap: float = GAP
) -> list[Turn]:
    draw = random.Random(seed)
    return [
        Turn(words(draw, draw.randint(*prompts)), draw.randint((most + 1) // 2, most), at * gap if count > 1 else 0)
        for at in range(count)
    ]


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


async def measure(side: Side, turns: Sequence[Turn]) -> Cost:
    wall, process = time.perf_counter(), time.process_time()
    got = await side(turns)
    tokens, elsewhere = got if isinstance(got, tuple) else (got, 0.0)
    return Cost(tokens, time.perf_counter() - wall, elsewhere or time.process_time() - process)


# ── the engines ──


def run_embedded(backend: EngineBackend) -> Side:
    async def one(turn: Turn) -> int:
        await asyncio.sleep(turn.at)
        return len((await backend.generate(Request(turn.prompt, Sampling(max_tokens=turn.count)))).logprobs)

    async def side(turns: Sequence[Turn]) -> int:
        return sum(await asyncio.gather(*map(one, turns)))

    return side


@contextlib.contextmanager
def continuous(model: Any) -> Iterator[Side]:
    """Transformers' continuous batching, set up for a CPU."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=512, max_batch_tokens=512, max_requests_per_batch=64, return_logprobs=True,
            allow_block_sharing=False,
        ),
    )  # fmt: skip
    manager.start()
    numbers = iter(range(1 << 30))

    async def one(turn: Turn) -> int:
        await asyncio.sleep(turn.at)
        name, done = f"turn-{next(numbers)}", asyncio.get_running_loop().create_future()
        manager.register_result_handler(name, done.set_result)
        manager.add_request(turn.prompt, request_id=name, max_new_tokens=turn.count)
        return len((await done).logprobs)

    async def side(turns: Sequence[Turn]) -> int:
        return sum(await asyncio.gather(*map(one, turns)))

    try:
        yield side
    finally:
        manager.stop(block=True)


def run_padded(model: Any) -> Side:
    """`generate`: all requests that have arrived when a batch ends form the next one, padded to the longest."""

    @torch.inference_mode()
    def batch(turns: Sequence[Turn]) -> int:
        longest, most = max(len(turn.prompt) for turn in turns), max(turn.count for turn in turns)
        ids = torch.tensor([[0] * (longest - len(turn.prompt)) + turn.prompt for turn in turns])
        mask = torch.tensor([[0] * (longest - len(turn.prompt)) + [1] * len(turn.prompt) for turn in turns])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=True, top_k=0,
            eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        return sum(turn.count for turn in turns)

    async def side(turns: Sequence[Turn]) -> int:
        started = time.perf_counter()
        left = list(turns)
        tokens = 0
        while left:
            await asyncio.sleep(max(left[0].at - (time.perf_counter() - started), 0))
            due = [turn for turn in left if turn.at <= time.perf_counter() - started]
            left = left[len(due) :]
            tokens += batch(due) if due else 0
        return tokens

    return side


@contextlib.contextmanager
def vllm_cpu(model: str, threads: int) -> Iterator[dict[str, Side]]:
    """vLLM in its own interpreter; an empty dictionary if it is not installed."""
    if not VLLM.exists():
        print(f"vLLM is skipped: there is no {VLLM} (`make vllm` creates it; VLLM_PYTHON names another)")
        yield {}
        return
    command = [VLLM, "-m", "benchmarks.sides.vllm_cpu", model, str(MEMORY)]
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}"}
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **cores},
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            sys.exit(f"vLLM did not start; `{VLLM} -m benchmarks.sides.vllm_cpu {model} {MEMORY}` says why")

        async def side(turns: Sequence[Turn]) -> tuple[int, float]:
            process.stdin.write(json.dumps([asdict(turn) for turn in turns]) + "\n")
            process.stdin.flush()
            tokens, seconds = json.loads(await asyncio.to_thread(process.stdout.readline))
            return tokens, seconds

        yield {"vLLM": side}


# ── chains of many turns ──


def run_chains(backend: EngineBackend, turns: int, count: int) -> Side:
    """Chains: the prompt of a turn is the previous one with the reply and an observation appended."""

    async def one(number: int, first: Turn) -> int:
        draw, prompt = random.Random(number), list(first.prompt)
        for turn in range(turns):
            request = Request(prompt, Sampling(max_tokens=count), chain=str(number), turn=turn)
            prompt = [*prompt, *(await backend.generate(request)).token_ids, *words(draw, OBSERVATION)]
        return turns * count

    async def side(chains: Sequence[Turn]) -> int:
        return sum(await asyncio.gather(*(one(number, first) for number, first in enumerate(chains))))

    return side


async def compare(
    sides: dict[str, Side], cases: dict[str, Callable[[int], Sequence[Turn]]], rounds: int
) -> list[list[str]]:
    """One row per case. Each round has new prompts, so that no engine has them in a cache.

    The machine's speed varies: ratios compare the rates of one round, the order of the engines alternates, and the
    median over the rounds is reported.
    """
    rows = []
    for title, turns_of in cases.items():
        spent: dict[str, list[Cost]] = {name: [] for name in sides}
        for seed in range(rounds):
            for name in [*sides][:: -1 if seed % 2 else 1]:
                spent[name].append(await measure(sides[name], turns_of(seed)))
        rates = [[measurement.rates for measurement in got] for got in spent.values()]
        against = [
            [embedded / max(others) for embedded, *others in zip(*together, strict=True)]
            for together in zip(*rates, strict=True)
        ]
        rows.append([title, *(f"{x:.1f} / {y:.1f}" for x, y in map(_medians, rates)), _format_ratios(against)])
    return rows


def _medians(pairs: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(median(column) for column in zip(*pairs, strict=True))


def _format_ratios(ratios: Sequence[Sequence[float]]) -> str:
    return " / ".join(f"{ratio:.2f}×" for ratio in _medians(ratios))


def draw_groups(count: int, most: int, seed: int) -> list[Turn]:
    """Chains as in a rollout: all have the same description of tools, and eight share a task."""
    draw = random.Random(seed)
    tools = words(draw, TOOL_PROMPT_TOKENS)
    tasks = [[*tools, *words(draw, draw.randint(15, 40))] for _ in range(0, count, 8)]
    return [Turn(tasks[at // 8], most, at * GAP) for at in range(count)]


async def run(options: argparse.Namespace) -> None:
    name, quick, only, threads = options.model, options.quick, options.only, options.threads
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()
    backends = [EngineBackend(model, kv_memory=MEMORY) for _ in range(3 if "torch" in options.sides else 2)]
    backend, uncached = backends[:2]
    uncached._engine._scheduler._share_prefixes = False
    sizes, most = ((1, 4), 8) if quick else ((1, 8, 32, 64), options.max_tokens)
    with contextlib.ExitStack() as stack:
        sides = {"agentfly": run_embedded(backend)}
        if "torch" in options.sides:
            backends[2]._runner._attention = DenseAttention
            sides["torch's attention"] = run_embedded(backends[2])
        if "transformers" in options.sides:
            other = AutoModelForCausalLM.from_pretrained(resolve(name), dtype=torch.float32).eval()
            sides["continuous batching"] = stack.enter_context(continuous(other))
            sides["generate, padded"] = run_padded(model)
        if "vLLM" in options.sides:
            sides |= stack.enter_context(vllm_cpu(name, threads))
        cases = {f"{size}": partial(draw_requests, size, most, gap=options.gap) for size in sizes}
        cases["8 of 1,000 tokens"] = partial(draw_requests, 8, most, prompts=(950, 1050), gap=options.gap)
        cases = {title: case for title, case in cases.items() if not only or title in only}
        for side in sides.values():
            await side(draw_requests(2, 4, -1))
        rows = await compare(sides, cases, 1 if quick else options.rounds)
    header = ["requests", *sides, "ratio to the best other"]
    title = f"Ragged requests, one every {options.gap * 1e3:.0f} ms, {threads} thread{'s' * (threads > 1)}"
    print_table(f"{title}: tokens per second of wall / CPU time", header, rows)

    if not only or "chains" in only:
        await multi_turn(backend, uncached, quick)
    for backend in backends:
        await backend.close()


async def multi_turn(backend: EngineBackend, uncached: EngineBackend, quick: bool) -> None:
    """Chains with a prefix cache, compared with chains that compute the whole history in every turn."""
    chains, turns, count = (4, 2, 4) if quick else (32, 6, 24)
    sides = {"agentfly": run_chains(backend, turns, count), "no cache": run_chains(uncached, turns, count)}
    cases = {
        f"{chains} × {turns}, each its own prompt": partial(draw_requests, chains, count),
        f"{chains} × {turns}, {TOOL_PROMPT_TOKENS} tokens describe tools, 8 chains per task": partial(
            draw_groups, chains, count
        ),
    }
    rows = await compare(sides, cases, 1)
    title = f"Chains of turns with {OBSERVATION}-token observations: tokens per second of wall / CPU time"
    print_table(title, ["chains × turns", *sides, "ratio"], rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m", help="One that `agentfly models` prepares.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=(), metavar="REQUESTS", help="rows of the first table: 32, …")
    parser.add_argument("--sides", nargs="*", default=SIDES[:2], choices=SIDES, help="To compare with AgentFly.")
    parser.add_argument("--threads", type=int, default=1, help="Per engine.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48, help="Sampled per request; at least half.")
    parser.add_argument("--gap", type=float, default=GAP, help="Seconds between two requests.")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
