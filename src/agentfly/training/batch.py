"""Training samples, the model inputs made of them, and passes over micro-batches that fit into memory.

A sample is a sequence of tokens of which the model sampled some; only those are trained on. With `p` the prompt, `a`
sampled tokens and `e` what an environment answered, the model reads everything before the last sampled token, and its
output is used at the positions before sampled tokens:

    tokens      p0 p1 p2 a0 a1 e0 e1 a2 a3 e2
    input_ids   p0 p1 p2 a0 a1 e0 e1 a2
    positions          ^  ^        ^  ^
    targets            a0 a1       a2 a3
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithms.base import SegmentArrays
from agentfly.algorithms.loss import TokenBatch
from agentfly.backends.engine.model_runner import TRACE_LOCK
from agentfly.errors import ConfigError, NonFiniteError, RecordError
from agentfly.segment import Floats, Ids

_LOG = logging.getLogger(__name__)
TOWER_TOKENS = 4
"""Patches per image token, whose activations a trained vision tower holds. Most towers merge 2 x 2 patches."""
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class ModelInputs:
    """Several sequences as the model reads them, without padding."""

    input_ids: tuple[Ids, ...]
    """Per sequence: all tokens before its last sampled token."""
    positions: tuple[Ids, ...]
    """Per sequence, [sampled]: the positions just before its sampled tokens."""
    targets: Ids
    """The sampled tokens of all sequences, concatenated."""
    segments: tuple[SegmentArrays, ...] = ()
    """The segments, if some of them have images; else empty."""

    @classmethod
    def from_segments(cls, segments: Sequence[SegmentArrays]) -> ModelInputs:
        sampled = [np.flatnonzero(segment.mask).astype(np.int32) for segment in segments]
        if any(len(indices) and indices[0] == 0 for indices in sampled):
            raise RecordError("the first token of a segment has nothing before it: the model cannot have sampled it")
        return cls(
            input_ids=tuple(segment.tokens[: num_input_tokens(segment)] for segment in segments),
            positions=tuple(indices - 1 for indices in sampled),
            targets=np.concatenate([each.tokens[indices] for each, indices in zip(segments, sampled, strict=True)]),
            segments=tuple(segments) if any(segment.images for segment in segments) else (),
        )

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of sampled tokens of each sequence."""
        return tuple(map(len, self.positions))


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
    """Log-probabilities under the teacher; None without one."""
    old_logprobs: Floats | None = None
    """Log-probabilities before the update; None lets the learner compute them where it needs them."""
    name: str = ""
    """For error messages: group/chain#segment."""

    def __post_init__(self) -> None:
        length = len(self.segment.tokens)
        for name in ("advantages", "returns", "reference_logprobs", "teacher_logprobs", "old_logprobs"):
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise RecordError(f"sample {self.name} has {length} tokens but {len(array)} {name}: one each")

    @cached_property
    def num_sampled_tokens(self) -> int:
        """Number of tokens the model sampled."""
        return int(self.segment.mask.sum())


def build_synthetic_samples(count: int, length: int, vocab_size: int) -> list[Sample]:
    """Samples of `length` tokens that are all sampled but the first, to measure an update."""
    ids = (np.arange(length) % vocab_size).astype(np.int32)
    zeros = np.zeros(length, np.float32)
    segment = SegmentArrays(ids, np.arange(length) > 0, zeros, turns=ids * 0, weight_versions=ids * 0)
    return [Sample(segment, zeros, returns=zeros, old_logprobs=zeros, reference_logprobs=zeros) for _ in range(count)]


def num_input_tokens(segment: SegmentArrays) -> int:
    """Tokens of a segment that the model reads: those after the last sampled token have no effect."""
    sampled = np.flatnonzero(segment.mask)
    return int(sampled[-1]) if len(sampled) else 0


def gather_field(samples: Sequence[Sample], field: str, device: torch.device) -> Tensor:
    """A field of the samples at their sampled tokens: [sampled tokens of all samples]."""
    for sample in samples:
        if getattr(sample, field) is None:
            raise RecordError(f"sample {sample.name} has no {field}, which this learner needs")
    return _concatenate([getattr(sample, field)[sample.segment.mask] for sample in samples], device)


def build_token_batch(
    samples: Sequence[Sample],
    weights: Sequence[float],
    logprobs: Tensor,
    entropies: Tensor,
    *,
    on_policy: bool,
    with_reference: bool,
    entropy_gradient: bool,
) -> TokenBatch:
    """Assemble what the loss reads. `weights`: per sample, the weight of one of its tokens in the loss.

    logprobs, entropies: [sampled tokens of all samples], under the model that is trained.
    on_policy: the model is still the one that sampled, so its own log-probabilities are the old ones.
    """
    device = logprobs.device
    counts = torch.tensor([sample.num_sampled_tokens for sample in samples])
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if on_policy else gather_field(samples, "old_logprobs", device),
        sampler_logprobs=_concatenate([each.segment.logprobs[each.segment.mask] for each in samples], device),
        advantages=gather_field(samples, "advantages", device),
        weights=_concatenate([np.repeat(weights, counts.numpy())], device),
        sequence_ids=torch.arange(len(counts)).repeat_interleave(counts).to(device),
        num_sequences=len(samples),
        reference_logprobs=gather_field(samples, "reference_logprobs", device) if with_reference else None,
        entropies=entropies if entropy_gradient else entropies.detach(),
    )


def _concatenate(arrays: Sequence[Floats], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32)).to(device)


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
                    with TRACE_LOCK:  # a new shape compiles the layers, while an engine may capture its own
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
