"""Low-rank adapters (LoRA), through peft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentfly.errors import ConfigError
from agentfly.extras import require_extra

_PREFIX, _BASE_LAYER = "base_model.model.", ".base_layer"
"""What peft adds to weight names: the prefix to all, the infix to those with an adapter."""


def add_lora(model: Any, rank: int, *, seed: int = 0) -> Any:
    """Wrap the model with adapters of this rank at all linear layers but the head; they start without effect.

    The model's own layers are replaced: create a backend that shares the model after this call.
    """
    if has_adapters(model):
        raise ConfigError("the model has adapters already: train those, and leave lora_rank out")
    with require_extra("lora_rank", "train"):
        import peft
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
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
        self._model = model

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._model.named_modules():
            if hasattr(layer, "get_delta_weight"):
                delta = sum(layer.get_delta_weight(each) for each in layer.active_adapters)
                weight = layer.get_base_layer().weight
                plain_name = f"{name.removeprefix(_PREFIX)}.weight".replace(_BASE_LAYER, "")
                yield plain_name, weight + delta.to(weight.dtype)


def save_adapters(model: Any, folder: Path) -> None:
    """Write the adapters alone, with the same bytes in every process."""
    for config in model.peft_config.values():
        for name, value in vars(config).items():
            if isinstance(value, set):  # peft would write it in hash order, which differs between processes
                setattr(config, name, sorted(value))
    model.save_pretrained(folder)


def load_adapters(model: Any, folder: Path) -> None:
    """Load adapters that `save_adapters` wrote."""
    import peft

    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder), device="cpu"))
