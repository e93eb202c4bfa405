"""Training samples, and passes over micro-batches of them that fit into memory."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentfly.algorithms.base import SegmentArrays
from agentfly.backends.engine.model_runner import TRACE_LOCK
from agentfly.errors import ConfigError, NonFiniteError, RecordError
from agentfly.segment import Floats, Mask

_LOG = logging.getLogger(__name__)
TOWER_TOKENS = 4
"""Patches per image token, whose activations a trained vision tower holds. Most towers merge 2 x 2 patches."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Sample:
    """A segment with its advantages; every array is [tokens], 0 where the model did not sample."""

    segment: SegmentArrays
    advantages: Floats
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy, scored as temperature 1."""
    returns: Floats | None = None
    """The critic's regression targets; None without a critic."""
    reference_logprobs: Floats | None = None
    """Log-probabilities under the reference model; None without one."""
    teacher_logprobs: Floats | None = None
    """Log-probabilities under the teacher; None without one, or where the divergence to it is a loss term."""
    old_logprobs: Floats | None = None
    """Log-probabilities before the update; None lets the learner compute them where it needs them."""
    observations: Mask | None = None
    """True on the observation tokens that are trained by their cross-entropy; None without this loss term."""
    name: str = ""
    """For error messages: group/chain#segment."""

    def __post_init__(self) -> None:
        length = len(self.segment.tokens)
        for name in ("advantages", "returns", "reference_logprobs", "teacher_logprobs", "old_logprobs", "observations"):
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise RecordError(f"sample {self.name} has {length} tokens but {len(array)} {name}: one each")

    @cached_property
    def num_sampled_tokens(self) -> int:
        """Number of tokens the model sampled."""
        return self.segment.num_sampled_tokens

    @cached_property
    def num_observation_tokens(self) -> int:
        """Number of observation tokens that are trained."""
        return 0 if self.observations is None else int(self.observations.sum())

    @cached_property
    def scored_segment(self) -> SegmentArrays:
        """The segment, whose mask is of all tokens that the loss needs the log-probability of."""
        if self.observations is None:
            return self.segment
        return replace(self.segment, mask=self.segment.mask | self.observations)


def number_turns(segments: Sequence[SegmentArrays]) -> npt.NDArray[np.int64]:
    """[sampled tokens of all segments] The index of each token's turn, counted over all of them."""
    turns = np.concatenate([segment.turns[segment.mask] for segment in segments])
    owners = np.repeat(np.arange(len(segments)), [segment.num_sampled_tokens for segment in segments])
    # The owners, too: a segment may begin with the number of the turn that the one before it ended with.
    starts = (np.diff(turns, prepend=turns[:1]) != 0) | (np.diff(owners, prepend=owners[:1]) != 0)
    return np.cumsum(starts)


def build_synthetic_samples(count: int, length: int, vocab_size: int) -> list[Sample]:
    """Samples of `length` tokens that are all sampled but the first, to measure an update."""
    zeros = np.zeros(length, np.float32)
    segment = SegmentArrays.from_tokens(np.arange(length) % vocab_size, prompt=1)
    return [Sample(segment, zeros, returns=zeros, old_logprobs=zeros, reference_logprobs=zeros) for _ in range(count)]


def gather_field(samples: Sequence[Sample], field: str, device: torch.device) -> Tensor:
    """A field of the samples at their sampled tokens: [sampled tokens of all samples]."""
    for sample in samples:
        if getattr(sample, field) is None:
            raise RecordError(f"sample {sample.name} has no {field}, which this learner needs")
    return concatenate([getattr(sample, field)[sample.segment.mask] for sample in samples], device)


def concatenate(arrays: Sequence[Floats], device: torch.device) -> Tensor:
    """The arrays as one tensor in float32 on the device."""
    return to_device(np.concatenate(arrays).astype(np.float32, copy=False), device)


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device. From pinned memory: any other copy waits for the GPU to be idle."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def split_micro_batches(
    items: Sequence[T], budget: int, length: Callable[[T], int], *, padded: bool = False
) -> list[list[T]]:
    """Batches of at most `budget` tokens, of items of similar length; a longer item is alone in its batch.

    padded: every item takes as many tokens as the longest of its batch.
    """
    batches: list[list[T]] = []
    total = longest = 0
    for item in sorted(items, key=length, reverse=True):
        tokens = length(item)
        if batches and (total + longest if padded else total + tokens) <= budget:
            batches[-1].append(item)
        else:
            batches.append([item])
            total = 0
            longest = tokens
        total += longest if padded else tokens
    return batches


def split_mini_batches(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """At most `count` batches in order, whose sizes differ by at most one."""
    bounds = np.linspace(0, len(items), min(count, len(items)) + 1).astype(int)
    return [items[start:end] for start, end in pairwise(bounds)]


class MicroBatchRunner:
    """Splits what a model is to compute so that it fits into memory, and runs it."""

    def __init__(self, device: torch.device, tokens: int, *, padded: bool, low_precision: bool) -> None:
        """`tokens`: maximum tokens in one pass. padded: every sequence takes as many as the longest of its pass."""
        self.device = device
        self.tokens = tokens
        self.configured_tokens = tokens
        """`tokens` before memory ran out."""
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
    def score(
        self, segments: Sequence[SegmentArrays], model: Callable[[Sequence[SegmentArrays]], Tensor]
    ) -> list[Floats]:
        """The numbers that `model` computes for sampled tokens, as one [tokens] array per segment, 0 elsewhere."""
        out = [np.zeros(len(segment.tokens), np.float32) for segment in segments]
        sampled = [index for index, segment in enumerate(segments) if segment.mask.any()]

        def forward(batch: list[int]) -> tuple[None, Callable[[], list[tuple[int, Floats]]]]:
            indices = [sampled[position] for position in batch]
            scores = model([segments[index] for index in indices]).float()  # [sampled tokens of all]
            ends = np.cumsum([segments[index].num_sampled_tokens for index in indices])
            return None, lambda: list(zip(indices, np.split(scores.cpu().numpy(), ends[:-1]), strict=True))

        for part in self.run([segments[index] for index in sampled], forward):
            for index, scores in part:
                out[index][segments[index].mask] = scores
        return out

    def _length(self, segment: SegmentArrays) -> int:
        """Tokens that a segment takes of the budget of a pass."""
        return segment.num_input_tokens + self.tower_tokens * len(segment.image_positions)

    def run(
        self,
        segments: Sequence[SegmentArrays],
        forward: Callable[[list[int]], tuple[Tensor | None, Callable[[], R]]],
        zero_grad: Callable[[], None] = lambda: None,
    ) -> list[R]:
        """Run `forward` over each micro-batch of the segments, and the backward pass of the loss that it returns.

        forward: takes the indices of a micro-batch's segments. Its second result is a function that reads the result of
        the micro-batch from the device. Where memory runs out, `zero_grad` drops the gradient so far, and all segments
        run again in smaller micro-batches, so that the gradient is that of one size. Raises ConfigError where one
        segment alone does not fit.
        """
        lengths = [self._length(segment) for segment in segments]
        while True:
            # Called after all passes are launched: reading waits for the GPU, which would then idle between two passes.
            readers: list[Callable[[], R]] = []
            batch: list[int] = []
            loss: Tensor | None = None
            try:
                for batch, is_filler in self._split(lengths):
                    with TRACE_LOCK:  # a new shape compiles the layers, while an engine may capture its own
                        with self._time_phase("forward"), self._raise_together(), self.autocast():
                            loss, read = forward(batch)
                        if loss is not None:
                            with self._time_phase("backward"):
                                # A filler only takes part in the collectives: its gradient must not count twice.
                                (loss * 0 if is_filler else loss).backward()
                            # Else the graph would live through the next forward pass: two micro-batches in memory.
                            loss = None
                    if not is_filler:
                        readers.append(read)
            except torch.OutOfMemoryError as error:
                reason = self._describe_out_of_memory(error)
            else:
                # What the GPU has not done yet is mostly backward passes, if there are any.
                with self._time_phase("backward" if torch.is_grad_enabled() else "forward"), self._raise_together():
                    results = [read() for read in readers]
                return self._gather(results)
            # Outside of the handler, whose traceback refers to the tensors of the failed pass: they would stay
            # allocated, and the smaller pass would run out of memory as well.
            loss = None
            readers.clear()
            zero_grad()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            sizes = [lengths[index] for index in batch]
            if len(batch) == 1:
                raise ConfigError(
                    f"a sequence of {sizes[0]:,} tokens alone runs out of memory in the learner ({reason}): set "
                    "gradient_checkpointing=true, train adapters (lora_rank=16), shorten chains "
                    "(run_options.context_length), or give the engine's cache less (backend.kv_memory)"
                )
            tokens = max(sizes) * len(batch) if self._padded else sum(sizes)
            # Half of the pass that failed, not of the budget: a batch that is far below the budget would fail again.
            self.tokens = min(self.tokens, tokens) // 2
            self.retries += 1
            message = "a pass over %s tokens ran out of memory (%s): repeated with micro_batch_tokens=%s from here on"
            _LOG.warning(message, f"{tokens:,}", reason, self.tokens)

    # ── what several ranks do differently ──

    def _split(self, lengths: Sequence[int]) -> list[tuple[list[int], bool]]:
        """The indices of each micro-batch, and whether it must have no effect, which never occurs in one process."""
        batches = split_micro_batches(range(len(lengths)), self.tokens, lengths.__getitem__, padded=self._padded)
        return [(batch, False) for batch in batches]

    def _gather(self, results: list[R]) -> list[R]:
        """The results of all ranks."""
        return results

    def _describe_out_of_memory(self, error: torch.OutOfMemoryError) -> str:
        """The reason; raises where a pass cannot be repeated."""
        return str(error).partition("\n")[0]

    def _raise_together(self) -> AbstractContextManager[None]:
        """Around a forward pass with a gradient, and around reading the results; with several ranks, all of them raise
        what it raises on any."""
        return nullcontext()

    @contextmanager
    def _time_phase(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start


def require_finite(loss: Tensor, what: str, terms: Tensor, samples: Sequence[Sample]) -> float:
    """The loss. Raises NonFiniteError if it is not finite, naming samples with non-finite terms. terms: [tokens]."""
    value = loss.item()
    if not math.isfinite(value):
        owners = np.repeat(np.arange(len(samples)), [sample.num_sampled_tokens for sample in samples])
        bad = sorted(set(owners[(~terms.isfinite()).cpu().numpy()].tolist()))
        bad_samples = [samples[index] for index in bad] or samples
        raise NonFiniteError(f"{what} is {value}: look at {name_samples(bad_samples)}")
    return value


def name_samples(samples: Sequence[Sample]) -> str:
    """The names of the first samples, for an error message."""
    some = ", ".join(sample.name or "(unnamed)" for sample in samples[:5])
    return f"the samples {some}" + (f" and {len(samples) - 5} more" if len(samples) > 5 else "")
