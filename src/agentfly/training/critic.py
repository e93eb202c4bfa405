"""The critic: a value model with its own backbone, head and optimizer.

It starts as a copy of the policy with a scalar head of zeros; frozen weights (under adapters the whole model, else
the vision tower) are shared, not copied. The value of the state before a token is read at the position before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from agentfly.errors import DataError
from agentfly.training.batch import ModelInputs
from agentfly.training.model import Backbone, copy_trainable
from agentfly.training.optimizer import Optimizer


class Critic:
    """A backbone with a value head, and the optimizer of both."""

    optimizer: Optimizer
    """Set by the learner, after it has placed the weights."""

    def __init__(self, model: Any, device: torch.device, **settings: Any) -> None:
        """The arguments are those of `Backbone`."""
        self.backbone = Backbone(copy_trainable(model), device, **settings)
        lm_head = self.backbone.model.get_output_embeddings().weight
        head = torch.nn.Linear(lm_head.shape[1], 1, device=lm_head.device, dtype=torch.float32)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self.backbone.model.set_output_embeddings(head)

    def __call__(self, inputs: ModelInputs) -> Tensor:
        """[sampled]: the value of the state before each sampled token, in float32."""
        head = self.backbone.model.get_output_embeddings()
        states = self.backbone.hidden_states(inputs)
        with torch.autocast(states.device.type, enabled=False):
            values = torch.nn.functional.linear(states.float(), head.weight.float(), head.bias.float())
        return values[:, 0]

    def state_dict(self) -> dict[str, Tensor]:
        weights = {f"weights/{name}": each.detach() for name, each in self.optimizer.weights.items()}
        return weights | {f"optimizer/{name}": each for name, each in self.optimizer.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.optimizer.weights.items():
            if f"weights/{name}" not in tensors:
                raise DataError(f"the checkpoint has no weight {name} of the critic")
            weight.copy_(tensors[f"weights/{name}"])
        self.optimizer.load_state_dict(strip_prefix("optimizer/", tensors))


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with `prefix`, under their names without it."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
