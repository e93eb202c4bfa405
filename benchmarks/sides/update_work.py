"""The workload of the update benchmark: chains of mixed lengths, and a model with random weights.

torch and transformers only: it is also imported in the environment of TRL. Each trainer is a process that performs some
updates and prints, as its last line, their cost.
"""

import gc
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

MIB = 2**20
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1200, "hidden_size": 160, "intermediate_size": 448, "num_hidden_layers": 3,
        "num_attention_heads": 5, "num_key_value_heads": 5,
    },
    "SmolLM2, 6 layers": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "SmolLM2-135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
}  # fmt: skip
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Chain:
    """Tokens of one chain: a prompt, then turns and the observations between them."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    """1 for sampled tokens."""
    advantage: float


@dataclass(frozen=True)
class Work:
    """The command-line arguments of a trainer."""

    shape: str
    chains: int
    scale: float
    """Factor of all lengths."""
    rounds: int

    @classmethod
    def from_arguments(cls) -> "Work":
        shape, chains, scale, rounds = sys.argv[1:]
        return cls(shape, int(chains), float(scale), int(rounds))

    def model(self) -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SHAPES[self.shape], tie_word_embeddings=True, pad_token_id=0))

    def trajectories(self) -> list[Chain]:
        """One to six turns each, most of them short: the longest is about five times the median."""
        draw = random.Random(0)
        return [self._chain(draw) for _ in range(self.chains)]

    def _chain(self, draw: random.Random) -> Chain:
        def words(least: int, most: int) -> list[int]:
            return [draw.randrange(3, 1200) for _ in range(round(self.scale * draw.randint(least, most)))]

        prompt, completion, mask = words(30, 90), list[int](), list[int]()
        for turn in range(min(draw.choice((1, 1, 2, 2, 3, 6)), 6)):
            observed = words(10, 60) if turn else []
            sampled = words(10, 70)
            completion += observed + sampled
            mask += [0] * len(observed) + [1] * len(sampled)
        return Chain(prompt, completion, mask, draw.gauss(0, 1))


def measure(work: Work, update: Callable[[], float]) -> None:
    """Perform the updates and print their cost without the first one. `update` returns the gradient norm."""
    gc.collect()
    before = resident()
    spent = []
    for _ in range(work.rounds + 1):
        wall, process = time.perf_counter(), time.process_time()
        norm = update()
        spent.append((time.perf_counter() - wall, time.process_time() - process))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    answer = {
        "wall": [round_seconds[0] for round_seconds in spent[1:]],
        "process": [round_seconds[1] for round_seconds in spent[1:]],
    }
    print(json.dumps({**answer, "peak": peak, "added": peak - before, "norm": norm}))


def resident() -> float:
    """Resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB
