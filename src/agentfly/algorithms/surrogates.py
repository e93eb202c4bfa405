"""What is minimised in place of the policy gradient: one number a sampled token, before it is weighed and summed.

With r = π / π_old of a token and A its advantage:

    clip     −min(r·A, clip(r, 1 − low, 1 + high)·A), and for A < 0 at most −dual·A where a dual clip is given
    gspo     the same with the sequence's ratio: the geometric mean of the ratios of its tokens
    cispo    −stop(clip(r, 1 − low, 1 + high))·A·log π: a clipped token keeps a gradient
    plain    −A·log π
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from agentfly.algorithms.divergence import LARGEST_LOG

Surrogate = Literal["clip", "gspo", "cispo", "plain"]
Clip = tuple[float, float] | tuple[float, float, float]
"""How far the ratio may go below 1 and above it; a third number bounds the ratio where the advantage is negative."""


def sequence_mean(numbers: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Each token's number replaced by the mean over its sequence."""
    counts = torch.bincount(sequence, minlength=sequences).clamp(min=1)
    return (sequence_sum(numbers, sequence, sequences) / counts)[sequence]


def sequence_sum(numbers: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """The sum over each sequence, one number a sequence."""
    return numbers.new_zeros(sequences).index_add(0, sequence, numbers)


def token_log_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """Each token's own ratio."""
    return (logprobs - old).clamp(-LARGEST_LOG, LARGEST_LOG)


def sequence_log_ratio(logprobs: Tensor, old: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """The sequence's ratio for each token, with the gradient of that token alone.

    So tokens of one sequence may have advantages of their own; where they share one, the gradient is the sequence's.
    """
    whole = sequence_mean((logprobs - old).detach(), sequence, sequences)
    return (whole + logprobs - logprobs.detach()).clamp(-LARGEST_LOG, LARGEST_LOG)


def clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """The pessimistic of two: the ratio as it is, and the ratio held near 1."""
    low, high, *dual = clip
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual[0] * advantages), loss)
    return loss


def clipped_weight(ratio: Tensor, advantages: Tensor, logprobs: Tensor, clip: Clip) -> Tensor:
    """The policy gradient, weighed by a ratio that is held near 1 and carries no gradient itself."""
    low, high, *_ = clip
    return -ratio.clamp(1 - low, 1 + high).detach() * advantages * logprobs


def plain(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """The policy gradient as it is."""
    return -advantages * logprobs
