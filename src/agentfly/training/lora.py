"""Low-rank adapters (LoRA), through peft."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentfly.backends.engine.vision import takes_images
from agentfly.errors import ConfigError
from agentfly.extras import require_extra

_PREFIX, _BASE_LAYER = "base_model.model.", ".base_layer"
"""What peft adds to weight names: the prefix to all, the infix to those with an adapter."""


def add_lora(model: Any, rank: int, *, seed: int = 0) -> Any:
    """Wrap the model with adapters of this rank at all linear layers but the head; they start without effect.

    Of a vision model, only the language model gets adapters: vLLM ignores those of the tower.
    The model's own layers are replaced: create a backend that shares the model after this call.
    """
    if has_adapters(model):
        raise ConfigError("the model has adapters already: train those, and leave lora_rank out")
    with require_extra("lora_rank", "train"):
        import peft
    targets: Any = "all-linear"
    if takes_images(model):
        layers = {id(each) for each in model.get_decoder().modules() if isinstance(each, torch.nn.Linear)}
        targets = [name for name, module in model.named_modules() if id(module) in layers]
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        adapted = peft.get_peft_model(model, settings)
    return adapted.eval()


def has_adapters(model: Any) -> bool:
    return hasattr(model, "disable_adapter")


class MergedWeights:
    """Iterates over the matrices with adapters, merged, under their names without peft.

    Each is computed when requested, so that they are never in memory together.
    """

    def __init__(self, model: Any) -> None:
        self.layers: dict[str, Any] = {
            f"{name.removeprefix(_PREFIX)}.weight".replace(_BASE_LAYER, ""): layer
            for name, layer in model.named_modules()
            if hasattr(layer, "get_delta_weight")
        }

    @torch.no_grad()
    def merge(self, name: str) -> Tensor:
        layer = self.layers[name]
        delta = sum(layer.get_delta_weight(each) for each in layer.active_adapters)
        weight = layer.get_base_layer().weight
        merged: Tensor = weight + delta.to(weight.dtype)
        return merged

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.merge(name)) for name in self.layers)


def save_adapters(model: Any, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapters alone, with the same bytes in every process. state: their weights; None: the model's."""
    for config in model.peft_config.values():
        for name, value in vars(config).items():
            if isinstance(value, set):  # peft would write it in hash order, which differs between processes
                setattr(config, name, sorted(value))
    model.save_pretrained(folder, state_dict=state)


def read_adapters(model: Any, folder: Path) -> dict[str, Tensor]:
    """The adapters that `save_adapters` wrote, under the names of the model's weights."""
    import peft

    (adapter,) = model.active_adapters
    saved = peft.load_peft_weights(str(folder), device="cpu")
    return {re.sub(r"(\.lora_\w+)\.(weight|bias)$", rf"\1.{adapter}.\2", name): each for name, each in saved.items()}
