"""Training samples, the model inputs made of them, and how they are split to fit into memory.

A sample is a sequence of tokens of which the model sampled some; only those are trained on. With `p` the prompt, `a`
sampled tokens and `e` what an environment answered, the model reads everything before the last sampled token, and its
output is used at the positions before sampled tokens:

    tokens      p0 p1 p2 a0 a1 e0 e1 a2 a3 e2
    input_ids   p0 p1 p2 a0 a1 e0 e1 a2
    positions          ^  ^        ^  ^
    targets            a0 a1       a2 a3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from agentfly.algorithms.base import SegmentArrays
from agentfly.algorithms.loss import TokenBatch
from agentfly.errors import RecordError
from agentfly.segment import Floats, Ids

T = TypeVar("T")


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
