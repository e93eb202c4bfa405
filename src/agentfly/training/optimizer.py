"""One step downhill: gradients are bounded, the rate follows a schedule, and what is no number moves nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from agentfly.errors import ConfigError, DataError, ModelBroken

Schedule = Literal["constant", "linear", "cosine"]
_KEPT = ("step", "exp_avg", "exp_avg_sq")
"""What Adam remembers of a weight."""


@dataclass(frozen=True, slots=True)
class Rate:
    """The learning rate, which all steps of one update share."""

    peak: float
    warmup: int = 0
    """Updates over which the rate rises to its peak."""
    schedule: Schedule = "constant"
    """What it does after that: `linear` and `cosine` reach 0 when `total` updates are done."""
    total: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"schedule is one of constant, linear, cosine, not {self.schedule!r}")
        if not self.peak >= 0 or not math.isfinite(self.peak):
            raise ConfigError(f"a learning rate is a number from 0, not {self.peak!r}")

    def at(self, update: int) -> float:
        """The rate of an update, counted from 0."""
        if update < self.warmup:
            return self.peak * (update + 1) / self.warmup
        done = min((update - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.schedule]
        return self.peak * left


class Descent:
    """AdamW over named weights."""

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], rate: Rate, *, weight_decay: float = 0.0, max_norm: float = 1.0
    ) -> None:
        """`weight_decay` pulls at matrices only; gradients are cut to `max_norm`."""
        self.weights = dict(weights)
        self.rate, self._max_norm = rate, max_norm
        matrices = [each for each in self.weights.values() if each.ndim > 1]
        vectors = [each for each in self.weights.values() if each.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # Fused: else the optimizer allocates as much again as the weights take.
        self._adam = torch.optim.AdamW([group for group in groups if group["params"]], lr=rate.peak, fused=True)

    def step(self, update: int) -> float:
        """Take the step that the gradients say; their norm before it was bounded."""
        gradients = [each.grad for each in self.weights.values() if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not norm.isfinite():
            wrong = [name for name, each in self.weights.items() if each.grad is not None and not _finite(each.grad)]
            raise ModelBroken(
                f"the gradient is not finite; the first weight with such a one is {(wrong or ['none'])[0]}"
            )
        torch.nn.utils.clip_grads_with_norm_(self.weights.values(), self._max_norm, norm)
        for group in self._adam.param_groups:
            group["lr"] = self.rate.at(update)
        self._adam.step()
        return float(norm)

    def clear(self) -> None:
        """Forget the gradients."""
        self._adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """What was remembered of each weight, by its name."""
        return {
            f"{name}/{kept}": self._adam.state[weight][kept]
            for name, weight in self.weights.items()
            for kept in _KEPT
            if weight in self._adam.state
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        names = {name.rpartition("/")[0] for name in tensors}
        if other := names ^ set(self.weights) if names else set():
            raise DataError(f"what was saved of the optimizer is of another model: look at {min(other)}")
        for name in names:
            weight = self.weights[name]
            self._adam.state[weight] = {kept: tensors[f"{name}/{kept}"].to(weight.device, copy=True) for kept in _KEPT}


def trainable(model: Any) -> dict[str, Tensor]:
    """The weights of a model that are to be trained, by name."""
    found = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if not found:
        raise ConfigError("no weight of this model is to be trained: all have requires_grad=False")
    if wrong := next((name for name, each in found.items() if each.dtype != torch.float32), None):
        raise ConfigError(
            f"{wrong} is in {found[wrong].dtype}: steps smaller than its last digit would be lost. Load the model to "
            "train in float32; precision='bfloat16' computes in bfloat16 all the same"
        )
    return found


def _finite(numbers: Tensor) -> bool:
    return bool(numbers.isfinite().all())
