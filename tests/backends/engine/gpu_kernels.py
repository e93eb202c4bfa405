"""The Triton kernels without a GPU.

`interpret` runs them in the interpreter of Triton beside plain implementations, and `engine` the engine with them, both
with TRITON_INTERPRET=1. `compile` builds them for chips that they run on. A process of its own for each.
"""

import asyncio
import random
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from agentfly.backends.engine import EngineBackend, backend, cuda_graphs, kernels, tiles
from agentfly.backends.engine.model_runner import ModelRunner
from agentfly.backends.engine.sampler import SamplingRow, sample
from agentfly.types import Completion, Sampling
from tests.backends.engine.tiny import backend_of, make_request, model_of

CPU = torch.device("cpu")


def attend_plainly(query, keys, values, slots, position: int, window: int | None) -> torch.Tensor:
    """Attention of one token: [head, width] in and out."""
    group = query.shape[0] // keys.shape[1]
    seen = slots[0 if window is None else max(position - window + 1, 0) : position + 1].long()
    heads = []
    for head in range(query.shape[0]):
        weights = (keys[seen, head // group] @ query[head] * 0.3).softmax(0)
        heads.append(weights @ values[seen, head // group])
    return torch.stack(heads)


def check_attention(seed: int) -> int:
    """Spans of random lengths, whose keys the storing kernel writes. Returns the largest number of parts of a tile."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    key_heads, group = draw.choice([(1, 3), (2, 2), (2, 8), (3, 1)])
    width = 16
    window = draw.choice([None, None, 20])
    pasts = [draw.choice([0, draw.randint(1, 30), draw.randint(100, 400)]) for _ in range(draw.randint(1, 4))]
    counts = [draw.choice([1, 1, 1, draw.randint(2, 40)]) for _ in pasts]
    lengths = [past + count for past, count in zip(pasts, counts, strict=True)]
    table = torch.zeros(len(pasts), 512, dtype=torch.int32)
    for row, slots in enumerate(torch.randperm(sum(lengths), dtype=torch.int32).split(lengths)):
        table[row, : len(slots)] = slots
    keys, values = torch.full((2, sum(lengths), key_heads, width), torch.nan)
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).int()
    positions = torch.cat([torch.arange(length) for length in lengths]).int()
    key, value = torch.randn(2, key_heads, sum(lengths), width)
    kernels.store_kv(key, value, keys, values, table, rows, positions)
    slots = table[rows.long(), positions.long()].long()
    assert torch.equal(keys[slots], key.transpose(0, 1))
    assert torch.equal(values[slots], value.transpose(0, 1))

    attending = torch.cat([torch.arange(past, past + count) for past, count in zip(pasts, counts, strict=True)]).int()
    rows = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).int()
    query = torch.randn(key_heads * group, len(rows), width)
    max_parts = draw.choice([1, 4, 20])
    plan = tiles.plan_tiles(
        np.cumsum(counts) - counts, np.array(counts), np.array(pasts), max_parts=max_parts,
        tokens_of_tile=tiles.tile_tokens(key_heads * group, key_heads, 16),
    )  # fmt: skip
    buffer = np.full((len(plan), len(plan.first) + 3), 7, np.int32)
    plan.write(buffer)
    queries = kernels.padded_queries(16, group)
    partial_results = kernels.PartialResults(2 * max_parts, key_heads, queries, width, CPU)
    for _ in range(2):  # the second layer finds what the first has left in the partial results
        out = kernels.paged_attention(
            query, keys, values, table, rows, attending, torch.from_numpy(buffer), partial_results,
            queries=16, scaling=0.3, keys_at_once=16, window=window,
        )  # fmt: skip
        assert not partial_results.finished.any()
        for token, (row, position) in enumerate(zip(rows.tolist(), attending.tolist(), strict=True)):
            right = attend_plainly(query[:, token], keys, values, table[row], position, window)
            torch.testing.assert_close(out[token], right, atol=2e-5, rtol=2e-5)
        query = query * 1.5
    return int(plan.parts.max())


def check_sampling() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5000) * 4
    temperatures = torch.tensor([0.0, 0.3, 1.0, 1.0, 2.0, 1.0])
    uniforms = torch.tensor([0.5, 0.1, 0.0, 0.9999, 0.5, 0.7])
    out = torch.zeros(3, 6)
    kernels.sample_plain(logits, temperatures, uniforms, out)
    settings = [Sampling(temperature=temperature) for temperature in temperatures.tolist()]
    rows = [SamplingRow(row, uniform, None) for row, uniform in zip(settings, uniforms.tolist(), strict=True)]
    tokens, logprobs, raw_logprobs = sample(logits, rows)
    assert torch.equal(out[0].view(torch.int32), tokens.int())
    torch.testing.assert_close(out[1:], torch.stack([logprobs, raw_logprobs]), atol=1e-4, rtol=1e-5)


def compile_attention(capability: int, queries: int, keys: int, windowed: bool) -> None:
    kernel = kernels._paged_attention_kernel
    constants = {"GROUP": 8, "QUERIES": queries, "WIDTH": 128, "KEYS": keys, "WINDOWED": windowed}
    types = dict.fromkeys(("query", "keys", "values", "out"), "*bf16") | {"scale": "fp32"}
    types |= dict.fromkeys(("partial_sums", "partial_highest", "partial_total"), "*fp32")
    types |= dict.fromkeys(("table", "rows", "positions", "finished"), "*i32")
    types |= {name: "*i32" for name in kernel.arg_names if name.startswith("part_")}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert "acq_rel" in compiled.asm["ptx"]


def replace_cuda() -> None:
    """Stand-ins for the few calls of CUDA that a step makes beside its kernels."""
    torch.zeros = partial(drop_pinning, torch.zeros)
    torch.cuda.Event = lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    torch.cuda.device = lambda _: nullcontext()
    torch.cuda.graph_pool_handle = lambda: None
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(multi_processor_count=4)


def drop_pinning(zeros: Any, *sizes: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
    return zeros(*sizes, **settings)


def build_graph_runner(model: Any, memory: int, gpu: bool) -> cuda_graphs.GraphRunner:
    runner = cuda_graphs.GraphRunner(model, memory, compiled=False)
    runner.captures = False
    return runner


async def sample_chains(engine: EngineBackend) -> list[Completion]:
    async def run_chain(number: int, length: int) -> list[Completion]:
        draw = random.Random(number)
        history = [draw.randrange(3, 300) for _ in range(length)]
        completions = []
        for turn in range(2):
            completions.append(await engine.generate(make_request(history, 4, seed=2 * number + turn)))
            history = [*history, *completions[-1].token_ids, 5, 6, 7]
        return completions

    chains = await asyncio.gather(*(run_chain(number, length) for number, length in enumerate((3, 40, 200))))
    await engine.close()
    return [completion for chain in chains for completion in chain]


def check_engine() -> None:
    """The engine as it runs on a GPU, not captured, beside the one that runs on a CPU."""
    replace_cuda()
    model = model_of()
    plans = []
    plan_tiles = cuda_graphs.plan_tiles
    cuda_graphs.plan_tiles = lambda *spans, **limits: plans.append(plan_tiles(*spans, **limits)) or plans[-1]
    cuda_graphs.SIZES = (1, 2, 4, 8, 64)
    completions = []
    for build in (lambda model, memory, gpu: ModelRunner(model, memory), build_graph_runner):
        backend._build_runner = build
        engine = backend_of(model, max_rows=4, max_batch_tokens=64)
        completions.append(asyncio.run(sample_chains(engine)))
    assert max(plan.parts.max() for plan in plans) > 1
    for on_cpu, on_gpu in zip(*completions, strict=True):
        assert list(on_cpu.token_ids) == list(on_gpu.token_ids)
        np.testing.assert_allclose(on_cpu.logprobs, on_gpu.logprobs, atol=1e-5)


if __name__ == "__main__":
    tiles.MIN_PART, tiles.PART_MULTIPLE = 32, 16
    if sys.argv[1] == "interpret":
        print("most parts", max(check_attention(seed) for seed in range(int(sys.argv[2]))))
        check_sampling()
    elif sys.argv[1] == "engine":
        check_engine()
    else:
        for capability in (80, 90):
            for queries, keys, windowed in ((16, 128, False), (16, 64, True), (64, 64, False)):
                compile_attention(capability, queries, keys, windowed)
