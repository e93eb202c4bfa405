"""KL divergence to the reference model, estimated on sampled tokens, and the controller of its coefficient.

With d = log π − log π_ref on tokens sampled from π, each estimator's mean is KL(π‖π_ref), or nearly:

    k1   d                   unbiased; may be negative
    k2   d² / 2              biased, low variance; as a loss, its gradient is that of the KL divergence
    k3   exp(−d) − 1 + d     unbiased, never negative; as a loss, its gradient is that of KL(π_ref‖π)

As a loss, k1 has a gradient of mean zero and no effect: it belongs in the reward.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from agentfly.errors import ConfigError
from agentfly.segment import Floats
from agentfly.validation import record

KLEstimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this magnitude before exponentiation: one outlier token cannot make the loss infinite."""


def kl_divergence(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """[tokens] The estimate of the KL divergence to the reference, token by token."""
    log_ratio = logprobs - reference
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return torch.expm1(-log_ratio) + log_ratio
    raise ConfigError(f"no KL estimator is named {estimator!r}; there are k1, k2 and k3")


def kl_penalty(logprobs: Floats, reference: Floats, estimator: KLEstimator, coef: float) -> Floats:
    """[tokens] The penalty where KL is part of the reward: `Episode.penalties` of one segment."""
    return (coef * kl_divergence(torch.from_numpy(logprobs), torch.from_numpy(reference), estimator)).numpy()


def teacher_advantages(logprobs: Floats, teacher: Floats, coef: float) -> Floats:
    """[tokens] coef · (log π_teacher − log π) of sampled tokens: descent on the reverse KL divergence to a teacher.

    The tokens are the student's own, so E[(log π − log π_teacher) ∇log π] is the gradient of KL(π ‖ π_teacher) in the
    states it visits. Later tokens are not credited: each token is compared with the teacher in its own state.
    """
    return (coef * (teacher - logprobs).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)).astype(np.float32)


@record(frozen=False, prefix="a KL controller's ")
class KLController:
    """The KL coefficient: constant without a target, else adapted to keep the divergence near the target.

    Each step multiplies it by 1 + error · chains / horizon, with the relative error clipped to ±0.2
    (Ziegler et al., 2019), so that a noisy estimate changes it slowly.
    """

    coef: float = Field(ge=0)
    target: float | None = Field(default=None, gt=0)
    """Target KL divergence per token, in nats; None keeps the coefficient constant."""
    horizon: float = Field(default=10_000.0, gt=0)
    """Chains over which the coefficient may change by a fifth."""

    def __post_init__(self) -> None:
        if self.target is not None and self.coef == 0:
            raise ConfigError("a KL coefficient of 0 stays 0 whatever the target: give one above 0 to start from")

    def update(self, divergence: float, chains: int) -> None:
        """Adapt to the mean divergence per token that a step of this many chains measured."""
        if self.target is not None:
            error = min(max(divergence / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * chains / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["value"]
