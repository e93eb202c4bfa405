"""Linear layers that are given the same input, computed as one product; on a CPU with weights in oneDNN's layout.

A model calls `q_proj`, `k_proj` and `v_proj` one after the other with one input: the first call computes all three, the
others take their part. On a GPU that is a third of the kernels; the layers' weights become views of one tensor, which
takes no more memory. On a CPU a product of few rows spends most of its time on reordering the weights; here that is
done once, for a copy of all large layers' weights, made at the first product after the weights have changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Parameter

from agentfly.backends.engine.kv_cache import free_memory

_LEAST_ROWS = 4
"""Fewer are multiplied as quickly with the weights as they are (on a CPU)."""
_LEAST_WEIGHTS = 100_000
"""Fewer are in the processor's cache in any layout (on a CPU)."""
_SHARE = 0.25
"""Of the free memory that the copies may take."""
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that are given the same input one after the other, by the names that transformers gives them."""


class PackedProduct:
    """The product of an input with the weights of one layer, or of several: each then takes its part."""

    def __init__(self, layers: list[Linear]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.packed: tuple[Tensor, Tensor | None] | None = None
        """The weights and biases of all, since the first product."""
        self._input: Tensor | None = None
        self._outputs: list[Tensor | None] = []
        """What has not been taken yet, of `_input`."""

    def take(self, index: int, input: Tensor) -> Tensor:
        """The output of one of the layers."""
        # `_input` is held while outputs remain, so that no other tensor can be the same object.
        output = self._outputs[index] if input is self._input else None
        if output is None:
            self._outputs = list(self.multiply(input).split(self.sizes, -1))
            self._input = input
            output = self._outputs[index]
            assert output is not None
        self._outputs[index] = None
        if all(remaining is None for remaining in self._outputs):
            self._input = None  # otherwise the input stays in memory until the next call
        return output

    def multiply(self, input: Tensor) -> Tensor:
        if self.packed is None:
            weight = torch.cat([layer.weight.detach() for layer in self.layers])
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None), self.bias()
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, *self.packed, "none", [], "")
        return product

    def bias(self) -> Tensor | None:
        biases = [layer.bias.detach() for layer in self.layers if layer.bias is not None]
        return torch.cat(biases) if biases else None


class GPUProduct(PackedProduct):
    """The same on a GPU. The layers' weights are moved into one tensor and stay views of it: a weight changed in
    place changes the product, also in CUDA graphs, which hold the tensor's address."""

    def __init__(self, layers: list[Linear]) -> None:
        super().__init__(layers)
        self.weight = _fuse([layer.weight for layer in layers])
        self.biases = None if layers[0].bias is None else _fuse([layer.bias for layer in layers])

    def multiply(self, input: Tensor) -> Tensor:
        return torch.nn.functional.linear(input, self.weight, self.biases)


class PackedLinear(Linear):
    """A linear layer whose output is a part of a product; for sampling, since no gradient passes it."""

    product: PackedProduct
    index: int

    def forward(self, input: Tensor) -> Tensor:
        few = not input.is_cuda and input.numel() < _LEAST_ROWS * self.in_features
        return super().forward(input) if few else self.product.take(self.index, input)


def pack(model: Any) -> None:
    """Replace a model's linear layers by packed ones where that is faster and, on a CPU, there is memory for copies."""
    groups = [group for parent in model.modules() for group in _groups(parent)]
    size = sum(layer.weight.numel() * layer.weight.itemsize for group in groups for layer in group)
    on_gpu = bool(groups) and groups[0][0].weight.is_cuda
    if not on_gpu and size > free_memory() * _SHARE:
        return
    for group in groups:
        product = GPUProduct(group) if on_gpu else PackedProduct(group)
        for index, layer in enumerate(group):
            layer.__class__ = PackedLinear
            vars(layer)["product"] = product
            vars(layer)["index"] = index


def unpack_weights(model: Any) -> None:
    """Drop the copies: the weights have changed, or are about to."""
    for layer in model.modules():
        if isinstance(layer, PackedLinear):
            layer.product.packed = None


def _fuse(parameters: Sequence[Tensor]) -> Parameter:
    """Move parameters into one, along their first dimension; each becomes a view of its part."""
    sizes = [len(parameter) for parameter in parameters]
    storage = parameters[0].untyped_storage()
    if (
        storage.nbytes() == sum(parameter.nbytes for parameter in parameters)
        and len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    ):
        # Another runner of this model has moved them.
        fused = torch.as_strided(parameters[0].data, (sum(sizes), *parameters[0].shape[1:]), parameters[0].stride(), 0)
        return Parameter(fused, requires_grad=False)
    fused = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, view in zip(parameters, fused.split(sizes), strict=True):
        parameter.data = view
    return Parameter(fused, requires_grad=False)


def _groups(parent: Any) -> Iterator[list[Linear]]:
    """The linear layers of a module that gain by being packed, those together that are given the same input."""
    # Exactly `Linear`: a subclass, such as a quantized or an adapted layer, computes something else.
    linear = {name: layer for name, layer in parent.named_children() if type(layer) is Linear}
    layers = {name: layer for name, layer in linear.items() if _can_pack(layer.weight)}
    for names in _TOGETHER:
        alike = {(layer.in_features, layer.bias is None) for name, layer in layers.items() if name in names}
        if layers.keys() >= set(names) and len(alike) == 1:
            group = [layers.pop(name) for name in names]
            if group[0].weight.is_cuda or sum(layer.weight.numel() for layer in group) >= _LEAST_WEIGHTS:
                yield group
    for layer in layers.values():
        if not layer.weight.is_cuda and layer.weight.numel() >= _LEAST_WEIGHTS:
            yield [layer]


def _can_pack(weight: Tensor) -> bool:
    if type(weight.data) is not torch.Tensor:
        return False
    if weight.device.type == "cpu":
        return weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return weight.is_cuda
