"""Low-rank adapters (LoRA), through peft; model files with or without adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentfly.backends.engine.loading import LazyWeights, load_model
from agentfly.backends.engine.vision import takes_images
from agentfly.errors import ConfigError, DataError, require_extra
from agentfly.models.huggingface import hide_progress_bars

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
        layers = {id(module) for module in model.get_decoder().modules() if isinstance(module, torch.nn.Linear)}
        targets = [name for name, module in model.named_modules() if id(module) in layers]
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        adapted = peft.get_peft_model(model, settings)
    return adapted.eval()


def has_adapters(model: Any) -> bool:
    return hasattr(model, "disable_adapter")


class MergedWeights(LazyWeights):
    """The matrices with adapters, merged, under their names without peft."""

    def __init__(self, model: Any) -> None:
        self.layers: dict[str, Any] = {
            f"{name.removeprefix(_PREFIX)}.weight".replace(_BASE_LAYER, ""): layer
            for name, layer in model.named_modules()
            if hasattr(layer, "get_delta_weight")
        }
        super().__init__({name: layer.get_base_layer().weight.shape for name, layer in self.layers.items()}, self.merge)

    @torch.no_grad()
    def merge(self, name: str) -> Tensor:
        layer = self.layers[name]
        delta = sum(layer.get_delta_weight(adapter) for adapter in layer.active_adapters)
        weight = layer.get_base_layer().weight
        merged: Tensor = weight + delta.to(weight.dtype)
        return merged


def save_model(model: Any, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write the whole model, or its adapters alone. state: the weights to write; None: those of the model."""
    if has_adapters(model):
        for config in model.peft_config.values():
            for name, value in vars(config).items():
                if isinstance(value, set):  # peft would write it in hash order, which differs between processes
                    setattr(config, name, sorted(value))
    with hide_progress_bars():
        model.save_pretrained(folder, state_dict=state)


def read_weights(model: Any, folder: Path, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that `save_model` wrote, in host memory, for each of `trained`. Raises DataError if one differs."""
    if has_adapters(model):
        import peft

        (adapter,) = model.active_adapters
        stored = peft.load_peft_weights(str(folder), device="cpu")
        pattern = re.compile(r"(\.lora_\w+)\.(weight|bias)$")
        saved = {pattern.sub(rf"\1.{adapter}.\2", name): tensor for name, tensor in stored.items()}
    else:
        saved = dict(load_model(str(folder), torch.device("cpu"), torch.float32).named_parameters())
    for name, weight in trained.items():
        if name not in saved or saved[name].shape != weight.shape:
            raise DataError(f"the model in {folder} is not the one being trained: its weight {name} differs")
    return {name: saved[name].detach() for name in trained}
