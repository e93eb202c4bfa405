"""`backend="transformers"`: tokens from a model in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from agentfly.backend import Backend, Request
from agentfly.backends.transformers.engine import Engine, OnUpdate
from agentfly.backends.transformers.job import Job
from agentfly.backends.transformers.loading import device_of, dtype_of, load_model, memory_of
from agentfly.backends.transformers.runner import PlainRunner, Runner, packs
from agentfly.encoding.codec import Codec
from agentfly.encoding.tokenizer import load_tokenizer
from agentfly.errors import BackendFault, ConfigError
from agentfly.models import resolve
from agentfly.template import Template
from agentfly.types import Completion

_LOG = logging.getLogger(__name__)


class TransformersBackend(Backend):
    """A Hugging Face causal language model, batched continuously."""

    def __init__(
        self,
        model: Any,
        *,
        device: str | None = None,
        dtype: str | None = None,
        kv_memory: int | None = None,
        max_rows: int | None = None,
        max_batch_tokens: int | None = None,
        on_update: str | OnUpdate = OnUpdate.CONTINUE,
    ) -> None:
        """`model`: a folder, a hub name, or a model object, whose weights are then shared and not copied.

        `kv_memory`: bytes for keys and values. `max_rows`: most turns sampled at once. `max_batch_tokens`: most tokens
        in one forward pass. `on_update`: what becomes of turns under way when the weights change: continue, finish,
        abort. None, everywhere, takes what suits the device.
        """
        try:
            self._on_update = OnUpdate(on_update)
        except ValueError:
            there = ", ".join(each.value for each in OnUpdate)
            raise ConfigError(f"on_update is one of {there}, not {on_update!r}") from None
        if isinstance(model, str):
            at = device_of(device)
            self._name = resolve(model)
            loaded = load_model(self._name, at, dtype_of(dtype, at))
        else:
            if device is not None or dtype is not None:
                raise ConfigError("a model object has its device and dtype already; leave device= and dtype= out")
            self._name, loaded = "", model
        at = next(loaded.parameters()).device
        gpu = at.type == "cuda"
        self._runner = _runner(loaded, memory_of(kv_memory, at), gpu)
        config = loaded.config.get_text_config()
        self.context_length = min(config.max_position_embeddings, self._runner.arena.capacity)
        self._engine = Engine(
            self._runner, max_rows or (512 if gpu else 64), max_batch_tokens or (32768 if gpu else 512)
        )
        self._codec: Codec | None = None

    @property
    def weight_version(self) -> int:
        return self._engine.version

    def attach(self, template: Template) -> None:
        self._codec = template.codec

    async def generate(self, request: Request) -> Completion:
        """Sample one turn in the batch with all others."""
        assert self.context_length is not None
        if not len(request.prompt):
            raise BackendFault("an empty prompt: there is nothing to go on from")
        room = self.context_length - len(request.prompt)
        if room < 1:
            raise BackendFault(
                f"the prompt has {len(request.prompt)} tokens, the context {self.context_length}: no room left"
            )
        if request.images:
            raise ConfigError("this backend shows a model text only")
        return await self._engine.sample(Job(request, min(request.sampling.max_tokens or room, room), self._decode))

    def _decode(self, ids: Sequence[int]) -> str:
        if self._codec is None:
            if not self._name:
                raise ConfigError("stop strings need a tokenizer: hand the backend to an agent, or name the model")
            self._codec = Codec(load_tokenizer(self._name), self._name)
        return self._codec.decode(ids)

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Copy weights into the model, by name, between two steps. Names that are left out keep their weights.

        A learner that trains the very model this backend was made of has nothing to hand over: `update_weights((), 5)`.
        """
        await self._engine.update(lambda: self._load(weights), version, self._on_update)

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, Any]]) -> None:
        named = dict(self._runner.model.named_parameters(remove_duplicate=False))
        given = list(weights)
        for name, value in given:  # all are looked at before the first is taken
            if name not in named:
                raise ConfigError(f"the model has no weight {name!r}; it has {', '.join(list(named)[:3])}, …")
            if named[name].shape != value.shape:
                wrong = f"{tuple(value.shape)}, not {tuple(named[name].shape)}"
                raise ConfigError(f"the weight {name!r} has the shape {wrong}")
        for name, value in given:
            named[name].copy_(value)

    async def close(self) -> None:
        await self._engine.close()


def _runner(model: Any, memory: int, gpu: bool) -> Runner:
    if not packs(model):
        _LOG.warning("%s is run one sequence at a time: its attention cannot be replaced", type(model).__name__)
        return PlainRunner(model, memory)
    if not gpu:
        return Runner(model, memory)
    from agentfly.backends.transformers.cuda import GraphRunner  # Triton comes with torch for GPUs only

    return GraphRunner(model, memory)
