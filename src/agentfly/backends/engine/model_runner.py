"""One forward pass of the model over a packed batch, and the tokens drawn from it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from agentfly.backends.engine import attention, packed_linear
from agentfly.backends.engine.attention import AttentionLayout, QuerySpan
from agentfly.backends.engine.cpu_attention import CPUAttention
from agentfly.backends.engine.kv_cache import KVCache
from agentfly.backends.engine.loading import config_shape
from agentfly.backends.engine.memory import zeros
from agentfly.backends.engine.request import EngineRequest
from agentfly.backends.engine.sampler import draw
from agentfly.backends.engine.scheduler import ScheduledChunk

Drawn = tuple[int, float, float]
"""A token, the log-probability it was drawn with, and the model's own."""


class ModelRunner:
    """A model over an arena."""

    reuses = True
    """Whether what was computed for one job can be used by another."""

    def __init__(self, model: Any, memory: int) -> None:
        """`model` lends its weights; `memory` are bytes for keys and values."""
        parameter = next(model.parameters())
        layers, heads, width = config_shape(model.config.get_text_config())
        capacity = max(memory // bytes_per_token(model), 1)
        self.device = parameter.device
        self.model = self._model(model)
        packed_linear.pack(self.model)
        self.arena = KVCache(capacity, zeros(self._data_shape(layers, capacity, heads, width), parameter.detach()))

    def _model(self, model: Any) -> Any:
        """The same weights in a model object of its own, whose attention reads the arena."""
        return share_weights(model, attention.NAME)

    def _data_shape(self, layers: int, capacity: int, heads: int, width: int) -> tuple[int, ...]:
        return (layers, 2, capacity, heads, width)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> list[list[Drawn]]:
        """Compute the chunks. For each, the tokens drawn behind it: none where its job has more to compute first."""
        logits = self.logits(chunks)
        rows = [chunk.job.row for chunk in chunks if chunk.samples]
        drawn = iter(zip(*(each.tolist() for each in draw(logits, rows)), strict=True) if rows else ())
        return [[next(drawn)] if chunk.samples else [] for chunk in chunks]

    def forget(self) -> None:
        """The weights are about to change."""
        packed_linear.unpack_weights(self.model)

    @torch.inference_mode()
    def first_nonfinite_module(self, tokens: Sequence[int]) -> str:
        """The first part of the model whose output is not finite for these tokens; empty where all are."""
        found: list[str] = []

        def look(name: str) -> Any:
            def hook(_: Any, __: Any, out: Any) -> None:
                first = out[0] if isinstance(out, tuple) else out
                if not found and isinstance(first, torch.Tensor) and not torch.isfinite(first).all():
                    found.append(name)

            return hook

        self.forget()  # a packed layer cannot be copied
        plain = share_weights(self.model, "eager")
        hooks = [part.register_forward_hook(look(name)) for name, part in plain.named_modules() if name]
        plain(torch.tensor([list(tokens)], device=self.device))
        for hook in hooks:
            hook.remove()
        return found[0] if found else ""

    def logits(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """The logits behind the last token of every chunk that ends its job's tokens."""
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        pieces: list[QuerySpan] = []
        ends: list[int] = []
        for chunk in chunks:
            job, past = chunk.job, chunk.job.cached
            assert job.stretch is not None
            pieces.append(QuerySpan(chunk.count, job.stretch.start, past))
            ids += job.tokens[past : past + chunk.count]
            positions += range(past, past + chunk.count)
            places += range(job.stretch.start + past, job.stretch.start + past + chunk.count)
            if chunk.samples:
                ends.append(len(ids) - 1)
        tensor = torch.tensor([ids, positions, places], device=self.device)
        kept = torch.tensor(ends, device=self.device, dtype=torch.long)
        return self._forward(tensor[:1], tensor[1:2], self._layout(tensor[2], tuple(pieces)), kept)

    def _layout(self, places: torch.Tensor, pieces: tuple[QuerySpan, ...]) -> AttentionLayout:
        return CPUAttention(self.arena, places, pieces)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, layout: AttentionLayout, kept: torch.Tensor | int
    ) -> torch.Tensor:
        out = self.model(input_ids=ids, position_ids=positions, logits_to_keep=kept, use_cache=False, layout=layout)
        logits: torch.Tensor = out.logits[0]
        return logits


class SequentialRunner(ModelRunner):
    """For a model whose attention cannot be replaced: one sequence at a time, with the model's own cache."""

    reuses = False

    def __init__(self, model: Any, memory: int) -> None:
        super().__init__(model, memory)
        self._pasts: WeakKeyDictionary[EngineRequest, Any] = WeakKeyDictionary()

    def _model(self, model: Any) -> Any:
        return share_weights(model)

    def _data_shape(self, layers: int, capacity: int, heads: int, width: int) -> tuple[int, ...]:
        return (0,)

    def logits(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        for chunk in chunks:
            if not chunk.job.cached:  # it starts, or starts anew with other weights
                self._pasts.pop(chunk.job, None)
        logits = [self._next(chunk) for chunk in chunks if chunk.samples]
        return torch.stack(logits) if logits else torch.empty(0)

    def _next(self, chunk: ScheduledChunk) -> torch.Tensor:
        """The logits behind a job's last token. A prompt is computed when all of it is there, never by chunks."""
        job = chunk.job
        past = self._pasts.get(job)
        ids = torch.tensor([job.tokens[job.cached :] if past is not None else job.tokens], device=self.device)
        out = self.model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        kept = getattr(out, "past_key_values", None)
        if kept is not None:
            self._pasts[job] = kept
        logits: torch.Tensor = out.logits[0, -1]
        return logits


def bytes_per_token(model: Any) -> int:
    """What the keys and values of one token take."""
    layers, heads, width = config_shape(model.config.get_text_config())
    return 2 * layers * heads * width * int(next(model.parameters()).dtype.itemsize)


def share_weights(model: Any, attention_by: str | None = None) -> Any:
    """The same weights in a model object of its own; `attention_by` names its attention, None leaves that as it is."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, memo)
    if attention_by is not None:
        twin.set_attn_implementation(attention_by)
    return twin.eval()
