"""CPU time of the engine's attention on a CPU, native and by torch's operators, in all layers of SmolLM2-135M's shape.

Rounds are interleaved; the medians are reported.

    python -m benchmarks.cpu_attention [--threads 1] [--rounds 8]
"""

import argparse
import sys
import time
from functools import partial
from statistics import median

import torch

from agentfly.backends.engine import native_kernels
from agentfly.backends.engine.attention import DenseAttention, LayerCache, NativeAttention, QuerySpan
from agentfly.backends.engine.kv_cache import ContiguousKVCache
from benchmarks.table import print_table

LAYERS, HEADS, KEY_HEADS, WIDTH = 30, 9, 3, 64
STRIDE = 1050
"""Slots from one sequence to the next."""
CASES = {
    "decoding 1 sequence of 1,000 tokens": [QuerySpan(1, 999, 0)],
    "decoding 8 of 1,000": [QuerySpan(1, 999, at * STRIDE) for at in range(8)],
    "decoding 8 of 100": [QuerySpan(1, 99, at * STRIDE) for at in range(8)],
    "decoding 32 of 100": [QuerySpan(1, 99, at * STRIDE // 4) for at in range(32)],
    "prefill of 512 tokens after 0": [QuerySpan(512, 0, 0)],
    "prefill of 512 after 488": [QuerySpan(512, 488, 0)],
    "prefill of 8 times 64": [QuerySpan(64, 0, at * STRIDE) for at in range(8)],
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernels = native_kernels.load()
    if kernels is None:
        sys.exit("there is no native kernel to measure: the warning above says why")
    capacity = 8 * STRIDE
    cache = ContiguousKVCache(capacity, torch.randn(LAYERS, 2, capacity, KEY_HEADS, WIDTH))
    kinds = {"native": partial(NativeAttention, kernels), "torch": DenseAttention}
    rows = []
    for title, spans in CASES.items():
        queries = torch.randn(sum(span.count for span in spans), HEADS, WIDTH).transpose(0, 1)
        spent: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(options.rounds + 1):
            for name in [*kinds][:: -1 if number % 2 else 1]:
                layout = kinds[name](cache, torch.empty(0), spans)
                begin = time.process_time()
                for keys, values in cache.data:
                    layout.attend(queries, LayerCache(keys, values, WIDTH**-0.5, window=None, softcap=None))
                spent[name].append(time.process_time() - begin)
        native, other = (median(times[1:]) * 1e3 for times in spent.values())
        rows.append([title, f"{native:.1f}", f"{other:.1f}", f"{other / native:.2f}×"])
    print_table(f"Attention in {LAYERS} layers: ms of CPU time", ["", *kinds, "ratio"], rows)


if __name__ == "__main__":
    main()
