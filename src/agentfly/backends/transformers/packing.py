"""Weights as oneDNN multiplies them fastest, on a CPU.

A plain product of a few rows lays the weights out anew each time, which takes longer than the product. Here that is
done once, at the first product after the weights have changed, for as much memory again as the weights take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Linear

from agentfly.backends.transformers.loading import free_memory

_LEAST_ROWS = 4
"""Fewer are multiplied as quickly with the weights as they lie."""
_LEAST_WEIGHTS = 100_000
"""A smaller layer is in the processor's cache however it lies."""
_SHARE = 0.25
"""Of the free memory that the second layout may take."""


class PackedLinear(Linear):
    """A linear layer whose weights are kept in both layouts; for sampling, since no gradient passes it."""

    packed: torch.Tensor | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() < _LEAST_ROWS * self.in_features:
            return super().forward(input)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return product


def pack(model: Any) -> None:
    """Have a model's large layers keep their weights in both layouts, where that is quicker and there is room."""
    layers = [each for each in model.modules() if type(each) is Linear and _gains(each.weight)]
    size = sum(each.weight.numel() * each.weight.itemsize for each in layers)
    if layers and size <= free_memory() * _SHARE:
        for each in layers:
            each.__class__ = PackedLinear


def forget(model: Any) -> None:
    """The weights have changed, or are about to."""
    for each in model.modules():
        if isinstance(each, PackedLinear):
            each.packed = None


def _gains(weight: torch.Tensor) -> bool:
    plain = type(weight.data) is torch.Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.numel() >= _LEAST_WEIGHTS and torch.backends.mkldnn.is_available()
