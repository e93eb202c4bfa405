"""How fast the engine's attention kernel reads the cache, alone: which tiles, splits and stages suit which step.

One layer of a published shape in bfloat16, captured as a CUDA graph, over a cache of scattered slots. Every row is a
step: tokens that are decoded, or a chunk of a prompt, behind a number of tokens.

    python -m benchmarks.attention_gpu [--shape qwen2.5-3b] [--sweep]
"""

import argparse
import itertools
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import SHAPES
from benchmarks.table import print_table

STEPS = [
    *((count, 1, past) for past in (128, 1_000, 4_000, 16_000, 32_000) for count in (1, 8, 32, 128, 256, 512)),
    *((1, chunk, past) for chunk in (512, 2_048, 8_192) for past in (0, 16_000)),
]
"""Sequences, tokens of each, and the tokens that each attends to beside its own."""
MOST_KEYS = 4_500_000
REPEATS = 20


def measure(
    shape: str, sequences: int, count: int, past: int, *, queries: int, keys: int, parts: int, **launch: int
) -> float:
    """Microseconds of one layer's attention."""
    from agentfly.backends.engine import kernels, tiles

    config = SHAPES[shape]
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    device = torch.device("cuda")
    length = past + count
    table = torch.randperm(sequences * length, device=device, dtype=torch.int32).view(sequences, length)
    cache = torch.randn(2, sequences * length, key_heads, width, device=device, dtype=torch.bfloat16)
    query = torch.randn(heads, sequences * count, width, device=device, dtype=torch.bfloat16)
    rows = torch.arange(sequences, device=device, dtype=torch.int32).repeat_interleave(count)
    positions = torch.arange(past, length, device=device, dtype=torch.int32).repeat(sequences)
    firsts = np.arange(sequences) * count
    plan = tiles.plan_tiles(
        firsts, np.full(sequences, count), np.full(sequences, past), max_parts=max(parts // key_heads, 1),
        tokens_of_tile=tiles.tile_tokens(heads, key_heads, queries),
    )  # fmt: skip
    device_plan = torch.from_numpy(np.stack(plan)).int().to(device)
    padded = kernels.padded_queries(queries, heads // key_heads)
    partial_results = kernels.PartialResults(2 * max(parts // key_heads, 1), key_heads, padded, width, device)

    def attend() -> Any:
        return kernels.paged_attention(
            query, cache[0], cache[1], table, rows, positions, device_plan, partial_results,
            queries=queries, scaling=width**-0.5, keys_at_once=keys, **launch,
        )  # fmt: skip

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            attend()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / REPEATS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-3b")
    parser.add_argument("--sweep", action="store_true", help="try all settings, not only those of the engine")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU here")
        return
    config = SHAPES[arguments.shape]
    key_bytes = 4 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    rows = []
    for sequences, count, past in STEPS[:3] if arguments.quick else STEPS:
        if sequences * (past + count) > MOST_KEYS:
            continue
        tokens = sequences * count
        choices = [(16 if tokens <= 512 else 64, 128 if tokens <= 128 else 64, parts, 4, 3) for parts in (1, 528)]
        if arguments.sweep:
            choices = list(
                itertools.product(
                    (16,) if count == 1 else (64, 128),
                    (64, 128),
                    (1, 264, 528, 1056) if count == 1 else (1, 528),
                    (4, 8),
                    (2, 3, 4),
                )
            )
        for queries, keys, parts, warps, stages in choices:
            try:
                spent = measure(
                    arguments.shape, sequences, count, past, queries=queries, keys=keys, parts=parts,
                    num_warps=warps, num_stages=stages,
                )  # fmt: skip
            except Exception as error:  # more shared memory than a multiprocessor has
                print(sequences, count, past, queries, keys, parts, warps, stages, type(error).__name__, flush=True)
                continue
            terabytes = sequences * (past + count) * key_bytes / spent / 1e6
            flops = 4 * tokens * (past + count / 2) * config.hidden_size / spent / 1e6
            rows.append(
                [
                    sequences,
                    count,
                    past,
                    queries,
                    keys,
                    parts,
                    warps,
                    stages,
                    f"{spent:.1f}",
                    f"{terabytes:.2f}",
                    f"{flops:.0f}",
                ]
            )
            print(*rows[-1], flush=True)
    columns = ["sequences", "tokens", "past", "queries", "keys", "programs", "warps", "stages", "µs", "TB/s", "TFLOP/s"]
    print_table(f"one layer of {arguments.shape}", columns, rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
