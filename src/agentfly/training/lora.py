"""Low-rank adapters (LoRA), through peft: a few weights beside each matrix are trained, the matrices are not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentfly.errors import ConfigError
from agentfly.extras import needed

_PREFIX, _INNER = "base_model.model.", ".base_layer"
"""What peft writes around the name of a weight: in front of all, and of those with an adapter."""


def with_lora(model: Any, rank: int, *, seed: int = 0) -> Any:
    """The model with adapters of this rank at all its linear layers but the head; they change nothing at first.

    The model's own layers are replaced: whoever samples from it is made after this.
    """
    if has_adapters(model):
        raise ConfigError("the model has adapters already: train those, and leave lora_rank out")
    with needed("lora_rank", "train"):
        import peft
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        adapted = peft.get_peft_model(model, settings)
    return adapted.eval()


def has_adapters(model: Any) -> bool:
    return hasattr(model, "disable_adapter")


class Merged:
    """The matrices that have adapters, with what those add, under the names they have without peft.

    Each is made when it is asked for, so that they never lie in memory together.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._model.named_modules():
            if hasattr(layer, "get_delta_weight"):
                added = sum(layer.get_delta_weight(each) for each in layer.active_adapters)
                weight = layer.get_base_layer().weight
                yield f"{name.removeprefix(_PREFIX)}.weight".replace(_INNER, ""), weight + added.to(weight.dtype)


def save_merged(model: Any, folder: Path) -> None:
    """Write the model with its adapters added in, as plain transformers loads it."""
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder)


def save_adapters(model: Any, folder: Path) -> None:
    """Write the adapters alone, with the same bytes in every process."""
    for config in model.peft_config.values():
        for name, value in vars(config).items():
            if isinstance(value, set):  # peft would list it in the order of its hashes, which differ between processes
                setattr(config, name, sorted(value))
    model.save_pretrained(folder)


def load_adapters(model: Any, folder: Path) -> None:
    """Take the adapters that were saved."""
    import peft

    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder), device="cpu"))
