"""Weights as oneDNN multiplies them fastest, on a CPU.

A plain product of a few rows lays the weights out anew each time, which takes longer than the product. Here that is
done once, at the first product after the weights have changed, for as much memory again as the weights take. Layers
that are given the same input are multiplied as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from agentfly.backends.engine.memory import free_memory

_LEAST_ROWS = 4
"""Fewer are multiplied as quickly with the weights as they lie."""
_LEAST_WEIGHTS = 100_000
"""Fewer are in the processor's cache however they lie."""
_SHARE = 0.25
"""Of the free memory that the second layout may take."""
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are given the same input one after the other, by the names that transformers gives them."""


class PackedProduct:
    """The product of an input with the weights of one layer, or of several: each then takes its part."""

    def __init__(self, layers: list[Linear]) -> None:
        self.layers = layers
        self.packed: tuple[Tensor, Tensor | None] | None = None
        """The weights and biases of all, since the first product."""
        self._input: Tensor | None = None
        self._parts: dict[Linear, Tensor] = {}
        """What has not been taken yet, of `_input`."""

    def part(self, layer: Linear, input: Tensor) -> Tensor:
        """What a layer makes of an input."""
        if input is not self._input or layer not in self._parts:
            sizes = [each.out_features for each in self.layers]
            self._parts = dict(zip(self.layers, self._whole(input).split(sizes, -1), strict=True))
        part = self._parts.pop(layer)
        self._input = input if self._parts else None
        return part

    def _whole(self, input: Tensor) -> Tensor:
        if self.packed is None:
            weight = _concatenate([each.weight for each in self.layers])
            bias = None if self.layers[0].bias is None else _concatenate([each.bias for each in self.layers])
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None), bias
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, *self.packed, "none", [], "")
        return product

    @property
    def size(self) -> int:
        return sum(each.weight.numel() * each.weight.itemsize for each in self.layers)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0].detach()


class PackedLinear(Linear):
    """A linear layer whose weights are kept in both layouts; for sampling, since no gradient passes it."""

    product: PackedProduct

    def forward(self, input: Tensor) -> Tensor:
        few = input.numel() < _LEAST_ROWS * self.in_features
        return super().forward(input) if few else self.product.part(self, input)


def pack(model: Any) -> None:
    """Have a model's large layers keep their weights in both layouts, where that is quicker and there is room."""
    products = [PackedProduct(layers) for parent in model.modules() for layers in _together(parent)]
    if sum(each.size for each in products) <= free_memory() * _SHARE:
        for product in products:
            for layer in product.layers:
                layer.__class__ = PackedLinear
                vars(layer)["product"] = product


def unpack_weights(model: Any) -> None:
    """The weights have changed, or are about to."""
    for each in model.modules():
        if isinstance(each, PackedLinear):
            each.product.packed = None


def _together(parent: Any) -> Iterator[list[Linear]]:
    """The linear layers of a module that gain by being packed, those together that are given the same input."""
    layers = {name: each for name, each in parent.named_children() if type(each) is Linear and _can(each.weight)}
    for names in _TOGETHER:
        alike = {(each.in_features, each.bias is None) for name, each in layers.items() if name in names}
        if layers.keys() >= set(names) and len(alike) == 1:
            yield from _gaining([layers.pop(name) for name in names])
    for layer in layers.values():
        yield from _gaining([layer])


def _gaining(layers: list[Linear]) -> Iterator[list[Linear]]:
    if sum(each.weight.numel() for each in layers) >= _LEAST_WEIGHTS:
        yield layers


def _can(weight: Tensor) -> bool:
    plain = type(weight.data) is torch.Tensor and weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available()
