"""Passes of the learner's models over micro-batches, of half the size from the first time that memory runs out."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithms.base import SegmentArrays
from agentfly.errors import ConfigError, NonFiniteError
from agentfly.segment import Floats
from agentfly.training.batch import ModelInputs, Sample, num_input_tokens, split_micro_batches

_LOG = logging.getLogger(__name__)
TOWER_TOKENS = 4
"""Patches per image token, whose activations a trained vision tower holds. Most towers merge 2 x 2 patches."""
T = TypeVar("T")
R = TypeVar("R")


class MicroBatchRunner:
    """Splits what a model is to compute so that it fits into memory, and runs it."""

    def __init__(self, device: torch.device, tokens: int, *, padded: bool, low_precision: bool) -> None:
        """`tokens`: maximum tokens in one pass. padded: every sequence takes as many as the longest of its pass."""
        self.device = device
        self.tokens = tokens
        self.retries = 0
        """Passes that ran out of memory and were repeated."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of the forward and backward passes."""
        self.low_precision = low_precision
        self.tower_tokens = 0
        """Tokens that an image token counts for beyond itself."""
        self.ranks = 1
        """Number of processes that share the passes."""
        self._padded = padded

    def autocast(self) -> torch.autocast:
        # Without the cache of casts: it would hold a low-precision copy of every weight until the forward pass ends,
        # also where checkpointing drops it with its layer, and no weight is cast twice in a pass.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.low_precision, cache_enabled=False)

    @torch.no_grad()
    def score(self, segments: Sequence[SegmentArrays], model: Callable[[ModelInputs], Tensor]) -> list[Floats]:
        """The numbers that `model` computes for sampled tokens, as one [tokens] array per segment, 0 elsewhere."""
        out = [np.zeros(len(segment.tokens), np.float32) for segment in segments]
        sampled = [index for index, segment in enumerate(segments) if segment.mask.any()]

        def forward(batch: list[int], inputs: ModelInputs) -> tuple[None, list[tuple[int, Floats]]]:
            scores = model(inputs).float().cpu().numpy()  # [sampled tokens of all segments]
            return None, list(zip(batch, np.split(scores, np.cumsum(inputs.counts)[:-1]), strict=True))

        for part in self.run(sampled, segments.__getitem__, forward):
            for index, scores in part:
                out[index][segments[index].mask] = scores
        return out

    def _length(self, segment: SegmentArrays) -> int:
        """Tokens that a segment takes of the budget of a pass."""
        return num_input_tokens(segment) + self.tower_tokens * len(segment.image_positions)

    def run(
        self,
        items: Sequence[T],
        get_segment: Callable[[T], SegmentArrays],
        forward: Callable[[list[T], ModelInputs], tuple[Tensor | None, R]],
        zero_grad: Callable[[], None] = lambda: None,
    ) -> list[R]:
        """Run `forward` over each micro-batch of the items, and the backward pass of the loss that it returns.

        Returns the second result of `forward` for every micro-batch. Where memory runs out, `zero_grad` drops the
        gradient so far, and the items are started again in smaller parts: the gradient is that of the smaller size.
        Raises ConfigError where one item alone does not fit.
        """

        def length(item: T) -> int:
            return self._length(get_segment(item))

        while True:
            results: list[R] = []
            batch: list[T] = []
            loss: Tensor | None = None
            try:
                for batch, is_filler in self._split(items, length):
                    inputs = ModelInputs.from_segments([get_segment(item) for item in batch])
                    with self._time_phase("forward"), self._raise_together(), self.autocast():
                        loss, result = forward(batch, inputs)
                    if loss is not None:
                        with self._time_phase("backward"):
                            (loss * 0 if is_filler else loss).backward()
                        loss = None  # the graph is freed before the next pass
                    if not is_filler:
                        results.append(result)
                return self._gather(results)
            except torch.OutOfMemoryError as error:
                reason = self._describe_out_of_memory(error)
            # Outside of the handler: the error's traceback refers to the tensors of the failed pass.
            loss = None
            results.clear()
            zero_grad()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            lengths = [length(item) for item in batch]
            if len(batch) == 1:
                raise ConfigError(
                    f"a sequence of {lengths[0]:,} tokens alone runs out of memory in the learner ({reason}): set "
                    "gradient_checkpointing=true, train adapters (lora_rank=16), shorten chains "
                    "(run_options.context_length), or give the engine's cache less (backend.kv_memory)"
                )
            tokens = max(lengths) * len(batch) if self._padded else sum(lengths)
            self.tokens = min(self.tokens, tokens) // 2
            self.retries += 1
            _LOG.warning(
                "a pass over %s tokens ran out of memory (%s): repeated with micro_batch_tokens=%s from here on",
                f"{tokens:,}",
                reason,
                self.tokens,
            )

    # ── what several ranks do differently ──

    def _split(self, items: Sequence[T], length: Callable[[T], int]) -> list[tuple[list[T], bool]]:
        """The micro-batches, and whether each must have no effect, which never occurs in one process."""
        return [(each, False) for each in split_micro_batches(items, self.tokens, length, padded=self._padded)]

    def _gather(self, results: list[R]) -> list[R]:
        """The results of all ranks."""
        return results

    def _describe_out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """The reason; raises where a pass cannot be repeated."""
        return str(error).partition("\n")[0]

    def _raise_together(self) -> AbstractContextManager[None]:
        """Around a forward pass with a gradient; with several ranks, all of them raise what it raises on any."""
        return nullcontext()

    @contextmanager
    def _time_phase(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def require_finite(loss: Tensor, what: str, terms: Tensor, samples: Sequence[Sample]) -> None:
    """Raise NonFiniteError if the loss is not finite, naming the samples with non-finite terms. terms: [tokens]."""
    if not loss.isfinite():
        owners = np.repeat(np.arange(len(samples)), [sample.num_sampled_tokens for sample in samples])
        bad = sorted(set(owners[(~terms.isfinite()).cpu().numpy()].tolist()))
        wrong = [samples[index] for index in bad] or samples
        raise NonFiniteError(f"{what} is {loss.item()}: look at {name_samples(wrong)}")


def name_samples(samples: Sequence[Sample]) -> str:
    """The names of the first samples, for an error message."""
    some = ", ".join(sample.name or "(unnamed)" for sample in samples[:5])
    return f"the samples {some}" + (f" and {len(samples) - 5} more" if len(samples) > 5 else "")
