"""One forward pass of the model over a packed batch, and the tokens drawn from it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from agentfly.backends.transformers import attention
from agentfly.backends.transformers.arena import Arena
from agentfly.backends.transformers.attention import Layout, Piece, Pieces
from agentfly.backends.transformers.sampling import draw
from agentfly.backends.transformers.scheduler import Chunk
from agentfly.errors import AgentFlyError

Drawn = tuple[int, float, float]
"""A token, the log-probability it was drawn with, and the model's own."""


class Unpacked(AgentFlyError):
    """This model cannot be run over packed batches."""


class Runner:
    """A model over an arena."""

    def __init__(self, model: Any, memory: int) -> None:
        """`model` shares its weights with the given one; `memory` are bytes for keys and values."""
        self.model = sharing(model)
        config = model.config.get_text_config()
        heads = config.num_key_value_heads or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        parameter = next(model.parameters())
        token = 2 * config.num_hidden_layers * heads * width * parameter.dtype.itemsize
        self.device = parameter.device
        self.arena = Arena(
            config.num_hidden_layers, heads, width, max(memory // token, 1), parameter.dtype, parameter.device
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[list[Drawn]]:
        """Compute the chunks. For each, the tokens drawn behind it: none where its job has more to compute first."""
        logits = self._logits(chunks)
        rows = [chunk.job.row for chunk in chunks if chunk.samples]
        drawn = iter(zip(*(each.tolist() for each in draw(logits, rows)), strict=True) if rows else ())
        return [[next(drawn)] if chunk.samples else [] for chunk in chunks]

    def _logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """The logits behind the last token of every chunk that ends its job's tokens."""
        ids: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        pieces: list[Piece] = []
        ends: list[int] = []
        for chunk in chunks:
            job, past = chunk.job, chunk.job.cached
            assert job.stretch is not None
            pieces.append(Piece(len(ids), chunk.count, job.stretch.start, past))
            ids += job.tokens[past : past + chunk.count]
            positions += range(past, past + chunk.count)
            places += range(job.stretch.start + past, job.stretch.start + past + chunk.count)
            if chunk.samples:
                ends.append(len(ids) - 1)
        tensor = torch.tensor([ids, positions, places], device=self.device)
        kept = torch.tensor(ends, device=self.device, dtype=torch.long)
        return self._forward(tensor[:1], tensor[1:2], self._layout(tensor[2], tuple(pieces)), kept)

    def _layout(self, places: torch.Tensor, pieces: tuple[Piece, ...]) -> Layout:
        return Pieces(self.arena, places, pieces)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout, kept: torch.Tensor | int
    ) -> torch.Tensor:
        out = self.model(input_ids=ids, position_ids=positions, logits_to_keep=kept, use_cache=False, layout=layout)
        logits: torch.Tensor = out.logits[0]
        return logits


def sharing(model: Any) -> Any:
    """The same weights in a model object of its own, whose attention reads the arena."""
    twin = copy.copy(model)
    twin.config = copy.deepcopy(model.config)
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    memo[id(model.config)] = twin.config
    twin = copy.deepcopy(model, memo)
    twin.set_attn_implementation(attention.NAME)
    return twin.eval()
