"""How far the model has strayed from a reference model, estimated from the tokens it sampled.

With d = log π − log π_ref on tokens sampled from π, the mean of each is the divergence KL(π‖π_ref), or nearly:

    k1   d                   unbiased; may be negative
    k2   d² / 2              biased, low variance; in a loss, its gradient is the gradient of the divergence
    k3   exp(−d) − 1 + d     unbiased, never negative; in a loss, its gradient is that of KL(π_ref‖π)

In a loss, k1 has a gradient of mean zero: it pulls nowhere. It belongs in the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentfly.errors import ConfigError
from agentfly.segment import Floats

Estimator = Literal["k1", "k2", "k3"]
LARGEST_LOG = 20.0
"""Log ratios are cut here before they are exponentiated, so that one wild token cannot make an infinite loss."""


def divergence(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """The divergence from the reference, estimated token by token."""
    apart = logprobs - reference
    match estimator:
        case "k1":
            return apart
        case "k2":
            return apart.square() / 2
        case "k3":
            apart = apart.clamp(-LARGEST_LOG, LARGEST_LOG)
            return torch.expm1(-apart) + apart
    raise ConfigError(f"no estimator of the divergence is named {estimator!r}; there are k1, k2 and k3")


def penalty(logprobs: Floats, reference: Floats, estimator: Estimator, coefficient: float) -> Floats:
    """What each token pays where the divergence is part of the reward: `Episode.penalties` of one piece."""
    charged = coefficient * divergence(torch.from_numpy(logprobs), torch.from_numpy(reference), estimator)
    return charged.numpy()


@dataclass
class KLController:
    """The weight of the divergence: fixed without a target, else steered so that the divergence stays near it.

    Each step multiplies the weight by 1 + error · chains / horizon, with the relative error cut to ±0.2
    (Ziegler et al., 2019), so a noisy estimate cannot throw it.
    """

    value: float
    target: float | None = None
    """None: the weight never changes."""
    horizon: float = 10_000.0
    """Over how many chains the weight may grow or shrink by a fifth."""

    def __post_init__(self) -> None:
        if self.value < 0 or self.horizon <= 0 or (self.target is not None and self.target <= 0):
            raise ConfigError(f"the weight of the divergence cannot be steered as {self}: give positive numbers")
        if self.target is not None and self.value == 0:
            raise ConfigError("a weight of 0 stays 0 whatever the target: give a `kl` to start from")

    def update(self, divergence: float, chains: int) -> None:
        """Take in what a step measured, averaged over its tokens."""
        if self.target is not None:
            error = min(max(divergence / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * chains / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
