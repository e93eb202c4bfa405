"""Importance-sampling corrections for sampler/learner mismatch.

Each token's loss is multiplied by ρ = π_learner / π_sampler. The level is what the ratio is taken over, the mode what
happens to a ratio too far from 1:

                 truncate: min(ρ, cap)     mask: ρ inside [1/cap, cap], else 0
    token        each token on its own
    sequence     product over the sequence: unbiased before the cap, of high variance
    geometric    geometric mean over the sequence: the same scale at any length
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, bincount

Correction = Literal[
    "token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "geometric-truncate", "geometric-mask"
]


def sequence_sum(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[tokens] → [sequences]: the sum over each sequence."""
    return values.new_zeros(num_sequences).index_add(0, sequence_ids, values)


def sequence_mean(values: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[tokens] → [tokens]: each value replaced by the mean over its sequence."""
    counts = bincount(sequence_ids, minlength=num_sequences).clamp(min=1)
    return (sequence_sum(values, sequence_ids, num_sequences) / counts)[sequence_ids]


def correction_weights(
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    sequence_ids: Tensor,
    *,
    num_sequences: int,
    correction: Correction,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """[tokens] each: the factors on the loss, without gradient; and which tokens were truncated or masked."""
    level, mode = correction.split("-")
    log_ratio = (old_logprobs - sampler_logprobs).detach()
    if level == "sequence":
        log_ratio = sequence_sum(log_ratio, sequence_ids, num_sequences)[sequence_ids]
    elif level == "geometric":
        log_ratio = sequence_mean(log_ratio, sequence_ids, num_sequences)
    ratio = log_ratio.exp()  # may be infinite; the cap makes it finite
    if mode == "truncate":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio < 1 / cap) | (ratio > cap)
    return ratio.masked_fill(outside, 0.0), outside
