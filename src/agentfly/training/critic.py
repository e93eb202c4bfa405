"""The critic: a model of its own that says, before each token, what the chain will still earn.

It begins as a copy of the policy with a head of one number, which begins at 0. Of a model with adapters it shares the
weights that are not trained. A value is of the state before a token, so it is read at the place before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from agentfly.errors import DataError
from agentfly.training.batch import Sequences
from agentfly.training.optimizer import Descent, trainable
from agentfly.training.trunk import Trunk


class Critic:
    """A trunk with a value head, and the optimizer of both."""

    def __init__(self, model: Any, descent: Callable[[Mapping[str, Tensor]], Descent], *, recompute: bool) -> None:
        """`descent` makes the optimizer of the weights it is given."""
        frozen = {id(each): each for each in model.parameters() if not each.requires_grad}
        self.trunk = Trunk(copy.deepcopy(model, frozen), recompute=recompute)
        words = self.trunk.model.get_output_embeddings().weight
        head = torch.nn.Linear(words.shape[1], 1, device=words.device, dtype=torch.float32)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        self.trunk.model.set_output_embeddings(head)
        self.descent = descent(trainable(self.trunk.model))

    def __call__(self, sequences: Sequences) -> Tensor:
        """The value of the state before each sampled token, one after the other."""
        head = self.trunk.model.get_output_embeddings()
        states = self.trunk(sequences)
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = head(states.float())
        return values[:, 0]

    def state_dict(self) -> dict[str, Tensor]:
        weights = {f"weights/{name}": each.detach() for name, each in self.descent.weights.items()}
        return weights | {f"optimizer/{name}": each for name, each in self.descent.state_dict().items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.descent.weights.items():
            if f"weights/{name}" not in tensors:
                raise DataError(f"nothing was saved of the critic's weight {name}")
            weight.copy_(tensors[f"weights/{name}"])
        self.descent.load_state_dict(below("optimizer/", tensors))


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
