"""The engine that sampled and the model that learns give the same token two probabilities: what is done about it.

Each token's loss is weighed by ρ, the learner's probability over the sampler's. A level says of what the ratio is
taken, a mode what becomes of one too far from 1:

                 truncate: min(ρ, cap)     mask: ρ inside [1/cap, cap], else 0
    token        each token for itself
    sequence     the product over the sequence: unbiased before the cap, of high variance
    geometric    its geometric mean: the same scale whatever the length
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from agentfly.algorithms.surrogates import sequence_mean, sequence_sum

Correction = Literal[
    "token-truncate", "token-mask", "sequence-truncate", "sequence-mask", "geometric-truncate", "geometric-mask"
]


def correction_weights(
    old: Tensor, sampled: Tensor, sequence: Tensor, sequences: int, correction: Correction, cap: float
) -> tuple[Tensor, Tensor]:
    """What to multiply each token's loss by, without a gradient; and which tokens were too far off."""
    level, mode = correction.split("-")
    apart = (old - sampled).detach()
    if level == "sequence":
        apart = sequence_sum(apart, sequence, sequences)[sequence]
    elif level == "geometric":
        apart = sequence_mean(apart, sequence, sequences)
    ratio = apart.exp()  # if infinite, the cap makes it finite
    if mode == "truncate":
        return ratio.clamp(max=cap), ratio > cap
    outside = (ratio < 1 / cap) | (ratio > cap)
    return ratio.masked_fill(outside, 0.0), outside
