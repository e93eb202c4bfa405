"""Whether rounding changes which experts a mixture-of-experts model chooses, and what that does to log-probabilities.

Plain forward passes of transformers, with the small random Mixtral of the engine's tests: one sequence with `sdpa`,
compared with the same sequence in a batch, cut short, or with another attention. All compute the same function.

    python -m benchmarks.expert_choice [--sequences 60] [--dtype bfloat16]
"""

import argparse
import copy
import random
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.table import print_table
from tests.backends.engine.test_architectures import PACKED, build_model
from tests.backends.engine.tiny import VOCABULARY

FAMILY = "mixtral"
LENGTH = 60

Routing = tuple[torch.Tensor, torch.Tensor]
"""Of a layer: router logits [tokens, experts], and the experts chosen [tokens, experts per token], sorted."""
Pass = Callable[[torch.Tensor], tuple[torch.Tensor, list[Routing]]]
"""Tokens [tokens] to log-probabilities [tokens, vocab] and the routing of every layer."""


def forward(model: Any, *, rows: int = 1, cut: int | None = None) -> Pass:
    """A pass over a sequence, as the first of `rows` and up to token `cut`."""
    routings: list[Routing] = []

    def record(router: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
        routings.append((inputs[0].float() @ router.weight.T.float(), output[2].sort(-1).values))

    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(record)

    @torch.inference_mode()
    def run(tokens: torch.Tensor) -> tuple[torch.Tensor, list[Routing]]:
        routings.clear()
        tokens = tokens[:cut]
        others = torch.randint(3, VOCABULARY, (rows - 1, len(tokens)))
        logits = model(torch.cat([tokens[None], others])).logits[0]
        first = slice(len(tokens))  # routers are given all sequences in one row
        routing = [(router.flatten(0, -2)[first], experts.flatten(0, -2)[first]) for router, experts in routings]
        return logits.float().log_softmax(-1), routing

    return run


def compare(title: str, one: Pass, other: Pass, sequences: int, chosen: int) -> list[str]:
    """A row of the table; `chosen`: experts per token."""
    draw = random.Random(1)
    tokens = differing = changed = 0
    largest = {True: 0.0, False: 0.0}
    gaps = []
    for _ in range(sequences):
        sequence = torch.tensor([draw.randrange(3, VOCABULARY) for _ in range(LENGTH)])
        logprobs, routing = other(sequence)
        count = len(logprobs)
        expected, expected_routing = one(sequence)
        difference = (logprobs - expected[:count]).abs().amax(-1)
        flips = torch.zeros(count, dtype=torch.bool)
        for (_, experts), (router, expected_experts) in zip(routing, expected_routing, strict=True):
            layer = (experts != expected_experts[:count]).any(-1)
            if layer.any() and not flips.any():  # later ones may follow from this one
                scores = router[int(layer.int().argmax())].sort(descending=True).values
                gaps.append(float(scores[chosen - 1] - scores[chosen]))
            flips |= layer
        unaffected = ~flips.int().cummax(0).values.bool()
        tokens += count
        differing += int((difference > 0).sum())
        changed += int(flips.sum())
        for is_flip, mask in ((True, flips), (False, unaffected)):
            largest[is_flip] = max([largest[is_flip], *difference[mask].tolist()])
    cells = [f"{differing} of {tokens}", str(changed), f"{largest[True]:.2f}", f"{largest[False]:.2f}"]
    return [title, *cells, f"{max(gaps, default=0):.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=60)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model(FAMILY, PACKED[FAMILY]).to(getattr(torch, options.dtype))
    models = [copy.deepcopy(model) for _ in range(5)]
    for eager_model in models[3:]:
        eager_model.set_attn_implementation("eager")
    alone, batch, cut, eager, eager_batch = models
    others = {
        "a batch of 8": forward(batch, rows=8),
        "the first 23 tokens only": forward(cut, cut=23),
        "eager attention": forward(eager),
        "eager attention, a batch of 8": forward(eager_batch, rows=8),
    }
    one = forward(alone)
    chosen = model.config.num_experts_per_tok
    rows = [compare(title, one, other, options.sequences, chosen) for title, other in others.items()]
    header = ["compared with", "tokens that differ", "other experts", "largest difference there", "before it", "gap"]
    print_table(f"Log-probabilities and experts of {FAMILY} in {options.dtype}, one sequence with sdpa", header, rows)


if __name__ == "__main__":
    main()
