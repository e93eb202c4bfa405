"""Throughput of the embedded engine on a GPU, compared with transformers' `generate` and vLLM, with log-probabilities.

A model of SmolLM2-135M's shape with random weights in bfloat16; every request has a prompt of its own and samples the
same number of tokens. vLLM is measured in the same run where it is installed.

    python -m benchmarks.engine_gpu [--quick]
"""

import argparse
import asyncio
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from agentfly.backends.base import Request
from agentfly.backends.engine import TransformersBackend
from agentfly.types import Sampling
from benchmarks.table import print_table

VOCABULARY = 49152
SHAPE = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
KV_MEMORY = 40 << 30


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(5, VOCABULARY) for _ in range(length)] for _ in range(count)]


def rate(run: Callable[[list[list[int]]], int], count: int, length: int, rounds: int = 3) -> float:
    """Tokens per second, the best of several rounds after a warm-up; no prompt is used twice."""
    best = 0.0
    for turn in range(rounds + 1):
        work = prompts(count, length, seed=1000 * count + turn)
        begun = time.perf_counter()
        sampled = run(work)
        if turn:
            best = max(best, sampled / (time.perf_counter() - begun))
    return best


class Ours:
    """The embedded engine, called from an event loop as in a rollout."""

    def __init__(self, model: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._backend = self._loop.run_until_complete(self._open(model))

    async def _open(self, model: Any) -> TransformersBackend:
        return TransformersBackend(model, kv_memory=KV_MEMORY)

    def __call__(self, work: list[list[int]], tokens: int) -> int:
        async def run() -> int:
            asked = (Request(row, Sampling(max_tokens=tokens, seed=at)) for at, row in enumerate(work))
            return sum(len(each.token_ids) for each in await asyncio.gather(*map(self._backend.generate, asked)))

        return self._loop.run_until_complete(run())

    def turns(self, chains: int, turns: int, shown: int, said: int) -> float:
        """Seconds for chains of several turns, each with an observation before it."""

        async def chain(number: int) -> None:
            history = prompts(1, 200, seed=number)[0]
            for turn in range(turns):
                request = Request(history, Sampling(max_tokens=said, seed=turn), chain=str(number), turn=turn)
                got = await self._backend.generate(request)
                history = [*history, *got.token_ids, *prompts(1, shown, seed=number * 100 + turn)[0]]

        async def run() -> None:
            await asyncio.gather(*(chain(number + 7777) for number in range(chains)))

        begun = time.perf_counter()
        self._loop.run_until_complete(run())
        return time.perf_counter() - begun

    def close(self) -> None:
        self._loop.run_until_complete(self._backend.close())
        self._loop.close()


def generate(model: Any, work: list[list[int]], tokens: int) -> int:
    ids = torch.tensor(work, device="cuda")
    model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return len(work) * tokens


class Vllm:
    """vLLM in this process, the sampled token's log-probability asked for."""

    def __init__(self, model: Any) -> None:
        from vllm import LLM

        folder = tempfile.mkdtemp()
        model.config.save_pretrained(folder)
        self._llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.4,
            enable_prefix_caching=False, max_model_len=4096, max_num_seqs=512,
        )  # fmt: skip

    def __call__(self, work: list[list[int]], tokens: int) -> int:
        from vllm import SamplingParams

        how = SamplingParams(max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        out = self._llm.generate([{"prompt_token_ids": row} for row in work], how, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in out)


@torch.inference_mode()
def difference(model: Any, ours: Ours) -> tuple[float, float]:
    """The largest differences of log-probabilities: engine to forward pass, and forward pass to another batch shape."""
    worst = noise = 0.0
    for length in (3, 40, 333):
        request = Request(prompts(1, length)[0], Sampling(max_tokens=64, seed=1))
        got = ours._loop.run_until_complete(ours._backend.generate(request))
        whole = torch.tensor([[*request.prompt, *got.token_ids]], device="cuda")
        at = torch.arange(length - 1, whole.shape[1] - 1, device="cuda")
        sampled = torch.tensor(list(got.token_ids), device="cuda")
        alone = model(whole).logits[0, at].float().log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        wide = torch.cat([whole, whole.new_zeros(1, 61)], 1).repeat(5, 1)
        padded = model(wide).logits[0, at].float().log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        worst = max(worst, (alone - torch.tensor(got.logprobs, device="cuda")).abs().max().item())
        noise = max(noise, (alone - padded).abs().max().item())
    return worst, noise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU here")
        return
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16).eval()
    sizes, tokens, rounds = ((1, 64), 32, 1) if quick else ((1, 64, 256, 512), 128, 3)
    begun = time.perf_counter()
    ours = Ours(model)
    ours(prompts(1, 8), 2)
    started = time.perf_counter() - begun
    sides: dict[str, Callable[[list[list[int]]], int]] = {"AgentFly": lambda work: ours(work, tokens)}
    sides["generate (no log-probabilities)"] = lambda work: generate(model, work, tokens)
    if importlib.util.find_spec("vllm") is not None:
        vllm = Vllm(model)
        sides["vLLM"] = lambda work: vllm(work, tokens)
    else:
        print("vLLM is not installed: left out")
    rows = []
    for name, run in sides.items():
        few = rounds if name != "generate (no log-probabilities)" else 1
        rows.append([name, *(f"{rate(run, count, 128, few):,.0f}" for count in sizes)])
    print_table(f"tokens a second, 128 prompt + {tokens} new tokens", ["requests", *map(str, sizes)], rows)
    if not quick:
        lengths = (128, 1024, 4096)
        row = ["AgentFly", *(f"{rate(lambda work: ours(work, tokens), 64, length):,.0f}" for length in lengths)]
        print_table("tokens a second at 64 requests by prompt length", ["prompt", *map(str, lengths)], [row])
        row = ["AgentFly", *(f"{rate(lambda work: ours(work, 32), count, 128):,.0f}" for count in (512, 1024, 2048))]
        print_table(
            "tokens a second by requests asked at once, 512 sampled at a time", ["", "512", "1024", "2048"], [row]
        )
        seconds = ours.turns(256, 6, 100, 64)
        print(f"256 chains of 6 turns, 100-token observations, 64 tokens a turn: {seconds:.2f} s")
    worst, noise = difference(model, ours)
    print(f"log-probabilities: {worst:.4f} from a forward pass; two batch shapes of that differ by {noise:.4f}")
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"start with compiling: {started:.1f} s; peak memory {peak:.1f} GiB, {KV_MEMORY >> 30} of it for the cache")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    ours.close()


if __name__ == "__main__":
    main()
