"""AdamW with gradient clipping and a learning-rate schedule; non-finite gradients raise."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from agentfly.errors import ConfigError, DataError, NonFiniteError
from agentfly.validation import record

_LOG = logging.getLogger(__name__)
Schedule = Literal["constant", "linear", "cosine"]
_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


@record(prefix="a learning-rate schedule's ")
class LRSchedule:
    """Learning rate by update; all optimizer steps of an update share it."""

    peak: float = Field(ge=0)
    warmup: int = Field(default=0, ge=0)
    """Updates of linear warm-up to the peak."""
    schedule: Schedule = "constant"
    """After the warm-up; `linear` and `cosine` reach 0 after `total` updates."""
    total: int = Field(default=1, ge=1)

    def at(self, update: int) -> float:
        """The learning rate of an update, counted from 0."""
        if update < self.warmup:
            return self.peak * (update + 1) / self.warmup
        done = min((update - self.warmup) / max(self.total - self.warmup, 1), 1.0)
        decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[self.schedule]
        return self.peak * decay


class Optimizer:
    """AdamW over named weights."""

    def __init__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        schedule: LRSchedule,
        *,
        weight_decay: float = 0.0,
        max_norm: float = 1.0,
    ) -> None:
        """`weight_decay` applies to matrices only; gradients are clipped to the norm `max_norm`."""
        self.weights = dict(weights)
        self.schedule = schedule
        self._max_norm = max_norm
        matrices = [weight for weight in self.weights.values() if weight.ndim > 1]
        vectors = [weight for weight in self.weights.values() if weight.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # No decay of biases and norms, whose size is no measure of complexity: it would pull the scales to 0.
        # Fused: the other implementations allocate temporaries as large as the weights.
        self._adam = torch.optim.AdamW([group for group in groups if group["params"]], lr=schedule.peak, fused=True)

    def step(self, update: int) -> float:
        """Take one step with the accumulated gradients; return their norm before clipping."""
        gradients = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        norm = gather(torch.nn.utils.get_total_norm(gradients.values()))
        if not norm.isfinite():  # clipping by an infinite norm would set every gradient to 0, or to NaN
            non_finite = (name for name, gradient in gradients.items() if not gather(gradient.norm()).isfinite())
            raise NonFiniteError(f"the gradient is not finite; the first such weight is {next(non_finite, 'none')}")
        torch.nn.utils.clip_grads_with_norm_(self.weights.values(), self._max_norm, norm)
        # Computed from the number of the update: a resumed run needs no state of a scheduler.
        for group in self._adam.param_groups:
            group["lr"] = self.schedule.at(update)
        self._adam.step()
        return float(norm)

    def zero_grad(self) -> None:
        self._adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """Adam's state as `weight name/state name` → tensor."""
        return {
            f"{name}/{key}": self._adam.state[weight][key]
            for name, weight in self.weights.items()
            for key in _ADAM_STATE
            if weight in self._adam.state
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        names = {name.rpartition("/")[0] for name in tensors}
        if other := names ^ set(self.weights) if names else set():
            raise DataError(f"the saved optimizer state belongs to another model: look at {min(other)}")
        for name, weight in self.weights.items() if names else ():
            # A copy: AdamW changes its state in place, and the tensors are the caller's.
            self._adam.state[weight] = {
                key: tensors[f"{name}/{key}"].to(weight.device, copy=True) for key in _ADAM_STATE
            }


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is sharded over the ranks; another one as it is."""
    # Not by its class: importing DTensor takes a second, which training in one process would spend for nothing.
    collect = getattr(tensor, "full_tensor", None)
    return tensor if collect is None else collect()


def trainable_parameters(model: Any) -> dict[str, Tensor]:
    """The parameters with requires_grad, by name. Raises ConfigError if there is none, or one is not float32."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ConfigError("this model has nothing to train: all weights have requires_grad=False")
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            raise ConfigError(
                f"{name} is in {parameter.dtype}: updates smaller than its rounding would be lost. Load the model to "
                "train in float32; precision='bfloat16' still computes in bfloat16"
            )
    return parameters


_USUAL_RATES = ((10e6, 1e-6, 3e-2), (1e9, 1e-8, 1e-3), (float("inf"), 1e-8, 1e-4))
"""Parameters of a model up to this number, and the learning rates between which it is usually trained."""


def warn_of_unusual_rate(model: Any, rate: float, *, lora: bool = False) -> None:
    """Log a warning for a learning rate far outside the usual range for a model of this size."""
    parameters = sum(weight.numel() for weight in model.parameters())
    low, high = next((low, high) for size, low, high in _USUAL_RATES if parameters <= size)
    high *= 10 if lora else 1  # adapters start at zero and take larger steps
    if not low <= rate <= high:
        effect = "the model may be destroyed within a few steps" if rate > high else "almost nothing is learned"
        kind = "with LoRA" if lora else "with all weights trained"
        _LOG.warning(
            "learning rate %g: %s; usual is %g to %g for %s parameters %s",
            *(rate, effect, low, high, f"{parameters:,}", kind),
        )
