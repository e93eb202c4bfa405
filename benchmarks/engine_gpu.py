"""How fast the embedded engine samples on a GPU, beside vLLM with its prefix cache, both with log-probabilities.

Random weights of a published shape in bfloat16. A workload is a number of chains: a prompt, then turns that sample a
fixed number of tokens, with an observation between them. vLLM is measured in the same run where it is installed.

    python -m benchmarks.engine_gpu [--shape qwen2.5-3b] [--workloads decode,turns,...] [--rounds 3] [--profile]

The workloads `long` have prompts of up to 32,000 tokens. Each is run twice: with one sampled token, which takes the
time of the prompts, and again behind the prefixes that both sides have cached, which takes that of decoding.
"""

import argparse
import asyncio
import importlib.util
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from agentfly.backends.base import Request
from agentfly.backends.engine import EngineBackend
from agentfly.types import Sampling
from benchmarks.shapes import SHAPES, build_model
from benchmarks.table import print_table

KV_MEMORY = 48 << 30
CONTEXT = 40_000
WARMUP = 2
"""Rounds before the measured ones: steps are captured when their number of tokens first occurs."""
BANDWIDTH = 4.3e12
"""Bytes a second that a device-to-device copy moves on an H200."""


@dataclass(frozen=True)
class Chain:
    """A prompt, and turns: how many tokens are sampled, and the observation that follows."""

    prompt: list[int]
    turns: list[tuple[int, list[int]]]


def independent(draw: random.Random, vocabulary: int, count: int, prompt: int, sampled: int) -> list[Chain]:
    return [Chain(_tokens(draw, vocabulary, prompt), [(sampled, [])]) for _ in range(count)]


def agents(
    draw: random.Random, vocabulary: int, count: int, prompt: int, turns: int, sampled: tuple[int, int], observed: int,
    group: int = 1,
) -> list[Chain]:  # fmt: skip
    """Chains of several turns; those of a group begin with the same prompt. `sampled`: least and most of a turn."""
    chains = []
    for number in range(count):
        begin = chains[-1].prompt if number % group else _tokens(draw, vocabulary, prompt)
        parts = [(draw.randint(*sampled), _tokens(draw, vocabulary, observed)) for _ in range(turns)]
        chains.append(Chain(begin, parts))
    return chains


def _tokens(draw: random.Random, vocabulary: int, count: int) -> list[int]:
    return [draw.randrange(5, vocabulary) for _ in range(count)]


WORKLOADS: dict[str, dict[str, Callable[[random.Random, int], list[Chain]]]] = {
    "decode": {
        f"{count} requests, 128 + 128": lambda draw, size, count=count: independent(draw, size, count, 128, 128)
        for count in (1, 64, 256, 512)
    },
    "prompts": {
        f"64 requests, {length} + 128": lambda draw, size, length=length: independent(draw, size, 64, length, 128)
        for length in (1024, 4096)
    },
    "queue": {
        f"{count} at once, 128 + 32": lambda draw, size, count=count: independent(draw, size, count, 128, 32)
        for count in (512, 1024, 2048)
    },
    "turns": {
        "256 chains x 6 turns, 100 + 64": lambda draw, size: agents(draw, size, 256, 200, 6, (64, 64), 100),
    },
    "alfworld": {
        "256 chains x 23 turns, 37 + 38": lambda draw, size: agents(draw, size, 256, 400, 23, (20, 56), 37, group=8),
    },
}

LONG = {
    f"{count} x {length:,} + 128": lambda draw, size, count=count, length=length: independent(
        draw, size, count, length, 128
    )
    for length in (4_000, 16_000, 32_000)
    for count in (1, 8, 32, 128)
    if count * length <= 1_100_000
} | {
    f"{count} agents x 30 turns, 1,000 + 150": lambda draw, size, count=count: agents(
        draw, size, count, 1000, 30, (150, 150), 1000
    )
    for count in (1, 8, 24)
}
"""Each fits into the cache at the shape of 3B: nothing is evicted."""


class Embedded:
    """The embedded engine, called from an event loop as a rollout calls it."""

    def __init__(self, model: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.backend = EngineBackend(model, kv_memory=KV_MEMORY)

    def __call__(self, chains: list[Chain]) -> int:
        async def run(number: int, chain: Chain) -> int:
            history = list(chain.prompt)
            sampled = 0
            for turn, (count, observed) in enumerate(chain.turns):
                request = Request(history, Sampling(max_tokens=count, seed=turn), chain=str(number), turn=turn)
                got = await self.backend.generate(request)
                history = [*history, *got.token_ids, *observed]
                sampled += len(got.token_ids)
            return sampled

        async def run_all() -> int:
            return sum(await asyncio.gather(*(run(number, chain) for number, chain in enumerate(chains))))

        return self._loop.run_until_complete(run_all())

    def close(self) -> None:
        self._loop.run_until_complete(self.backend.close())
        self._loop.close()


class Vllm:
    """vLLM in this process, with its prefix cache and the sampled token's log-probability."""

    def __init__(self, model: Any) -> None:
        from vllm import LLM

        folder = tempfile.mkdtemp()
        model.config.save_pretrained(folder)
        self._llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.45,
            enable_prefix_caching=True, max_model_len=CONTEXT, max_num_seqs=512,
        )  # fmt: skip
        self._asked = 0

    def __call__(self, chains: list[Chain]) -> int:
        """A request is added when its chain's last turn has ended, as from a rollout."""
        engine = self._llm.llm_engine
        state = {}
        sampled = 0
        for number, chain in enumerate(chains):
            state[str(self._asked)] = (number, 0, chain.prompt)
            self._add(engine, chain.prompt, chain.turns[0][0])
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    request_id = (
                        output.request_id if output.request_id in state else output.request_id.rsplit("-", 1)[0]
                    )
                    number, turn, history = state.pop(request_id)
                    ids = list(output.outputs[0].token_ids)
                    sampled += len(ids)
                    _, observed = chains[number].turns[turn]
                    if turn + 1 < len(chains[number].turns):
                        history = [*history, *ids, *observed]
                        state[str(self._asked)] = (number, turn + 1, history)
                        self._add(engine, history, chains[number].turns[turn + 1][0])
        return sampled

    def _add(self, engine: Any, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        how = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, how)
        self._asked += 1


def bound(chains: list[Chain], model: Any, rows: int = 512) -> float:
    """Tokens a second if every decode step only read the weights and the cache of its rows, at full bandwidth."""
    config = model.config
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size
    per_token //= config.num_attention_heads
    sampled = contexts = 0
    for chain in chains:
        length = len(chain.prompt)
        for count, observed in chain.turns:
            sampled += count
            contexts += count * length + count * (count - 1) // 2
            length += count + len(observed)
    steps = sampled / min(len(chains), rows)
    return sampled / ((steps * weights + contexts * per_token) / BANDWIDTH)


def measure_long(model: Any, sides: dict[str, Callable[[list[Chain]], int]], rounds: int) -> None:
    """Print tokens a second of prompts and of decoding apart; of agents, sampled tokens of whole chains."""
    rows = []
    for name, build in LONG.items():
        best: dict[str, tuple[float, float]] = {}
        for side, run in sides.items():
            for turn in range(rounds + 1):  # the first is a warm-up
                chains = build(random.Random(turn), model.config.vocab_size)
                prompt_tokens = prompt_seconds = 0.0
                if len(chains[0].turns) == 1:
                    started = time.perf_counter()
                    run([Chain(chain.prompt, [(1, [])]) for chain in chains])
                    prompt_seconds = time.perf_counter() - started
                    prompt_tokens = sum(len(chain.prompt) for chain in chains)
                started = time.perf_counter()
                decode_rate = run(chains) / (time.perf_counter() - started)
                prompt_rate = prompt_tokens / prompt_seconds if prompt_tokens else 0.0
                print(name, side, f"prompts {prompt_rate:,.0f}", f"decoding {decode_rate:,.0f}", flush=True)
                if turn:
                    earlier_prompt_rate, earlier_decode_rate = best.get(side, (0.0, 0.0))
                    best[side] = (max(prompt_rate, earlier_prompt_rate), max(decode_rate, earlier_decode_rate))
        rates = [f"{rate:,.0f}" if rate else "" for pair in zip(*best.values(), strict=True) for rate in pair]
        rows.append([name, *rates, f"{bound(chains, model):,.0f}"])
    columns = [f"{what}, {side}" for what in ("prompts", "decoding") for side in sides]
    print_table("tokens a second", ["workload", *columns, "bound of decoding"], rows)


@torch.inference_mode()
def difference(model: Any, embedded: Embedded) -> tuple[float, float]:
    """The largest differences of log-probabilities: engine to forward pass, and forward pass to another batch shape."""
    worst = noise = 0.0
    draw = random.Random(3)
    requests = [
        Request(_tokens(draw, model.config.vocab_size, length), Sampling(max_tokens=64, seed=1))
        for length in (3, 40, 333, 1200)
    ]

    async def run() -> Any:
        return await asyncio.gather(*map(embedded.backend.generate, requests))

    for request, got in zip(requests, embedded._loop.run_until_complete(run()), strict=True):
        whole = torch.tensor([[*request.prompt, *got.token_ids]], device="cuda")
        at = torch.arange(len(request.prompt) - 1, whole.shape[1] - 1, device="cuda")
        sampled = torch.tensor(list(got.token_ids), device="cuda")
        alone = model(whole).logits[0, at].float().log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        wide = torch.cat([whole, whole.new_zeros(1, 61)], 1).repeat(5, 1)
        padded = model(wide).logits[0, at].float().log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        worst = max(worst, (alone - torch.tensor(got.logprobs, device="cuda")).abs().max().item())
        noise = max(noise, (alone - padded).abs().max().item())
    return worst, noise


def profile(embedded: Embedded, chains: list[Chain]) -> None:
    """Print where the engine's thread spends a workload: samples of its innermost frames of this package."""
    import sys
    import threading

    ident = embedded.backend._engine._thread.ident
    samples_by_line: Counter[str] = Counter()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            frame = sys._current_frames().get(ident or 0)
            while frame is not None and "agentfly" not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None:
                samples_by_line[f"{frame.f_code.co_name}:{frame.f_lineno}"] += 1

    thread = threading.Thread(target=look)
    thread.start()
    embedded(chains)
    ended.set()
    thread.join()
    for name, count in samples_by_line.most_common(25):
        print(f"{count / samples_by_line.total():6.1%} {name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of decoding; the figures are not meaningful")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU here")
        return
    model = build_model(arguments.shape, "cuda", torch.bfloat16, context=CONTEXT)
    started = time.perf_counter()
    embedded = Embedded(model)
    embedded(independent(random.Random(0), 1000, 1, 8, 2))
    print(f"start with compiling: {time.perf_counter() - started:.1f} s", flush=True)
    sides: dict[str, Callable[[list[Chain]], int]] = {"AgentFly": embedded}
    if importlib.util.find_spec("vllm") is not None:
        sides["vLLM"] = Vllm(model)
    else:
        print("vLLM is not installed: left out")
    rows = []
    rounds = 1 if arguments.quick else arguments.rounds
    groups = ["decode"] if arguments.quick else arguments.workloads.split(",")
    if "long" in groups:
        groups.remove("long")
        measure_long(model, sides, rounds)
    for group in groups:
        for name, build in WORKLOADS[group].items():
            cells = [name]
            for run in sides.values():
                rates = []
                for turn in range(rounds + WARMUP):  # no prompt is seen twice
                    chains = build(random.Random(turn), model.config.vocab_size)
                    started = time.perf_counter()
                    sampled = run(chains)
                    rates.append(sampled / (time.perf_counter() - started))
                cells.append(f"{max(rates[WARMUP:]):,.0f}")
                print(name, cells[-1], [round(rate) for rate in rates], flush=True)
            chains = build(random.Random(0), model.config.vocab_size)
            rows.append([*cells, f"{bound(chains, model):,.0f}"])
            if arguments.profile:
                profile(embedded, build(random.Random(99), model.config.vocab_size))
    worst, noise = difference(model, embedded)
    print_table(f"sampled tokens a second, {arguments.shape}", ["workload", *sides, "bound"], rows)
    print(f"log-probabilities: {worst:.4f} from a forward pass; two batch shapes of that differ by {noise:.4f}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {KV_MEMORY >> 30} of it for the cache")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    embedded.close()


if __name__ == "__main__":
    main()
