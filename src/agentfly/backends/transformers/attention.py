"""Attention of a packed batch over the arena: tokens of many sequences in one row, each seeing its own past only.

Registered with transformers under the name `agentfly`. A model that asks the registry for its attention then runs any
mixture of prefill and decode in one forward pass, with its own weights and its own code for everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentfly.backends.transformers.arena import Arena

NAME = "agentfly"
BLOCK = 64
"""Tokens of a prompt that look at their past in one call: of more, the kernel computes much that none of them sees."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of one sequence in the batch."""

    at: int
    """Where they begin in the batch."""
    count: int
    start: int
    """Where the sequence begins in the arena."""
    past: int
    """Tokens of the sequence that are in the arena already."""

    @property
    def seen(self) -> int:
        """Tokens that the last of these sees, itself among them."""
        return self.past + self.count

    def blocks(self) -> Iterator[Piece]:
        """The same tokens in pieces of no more than a block each."""
        for begin in range(0, self.count, BLOCK):
            yield Piece(self.at + begin, min(BLOCK, self.count - begin), self.start, self.past + begin)


@dataclass(frozen=True, slots=True)
class Past:
    """What one layer has computed so far, and how it is looked at."""

    keys: torch.Tensor
    """[place, head, width]"""
    values: torch.Tensor
    scaling: float
    window: int | None
    """Tokens back that are seen; None: all."""
    softcap: float | None
    """The bound of scores; None: there is none."""


class Layout(Protocol):
    """Whose tokens are in a batch, and where their keys and values go."""

    arena: Arena
    places: torch.Tensor
    """The place in the arena of every token of the batch."""

    def attend(self, rows: torch.Tensor, past: Past) -> torch.Tensor:
        """What every token gathers from its own past. `rows`: [token, head, width]."""
        ...


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    layout: Layout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write this layer's keys and values into the arena, and attend. Tensors are [1, head, token, width]."""
    if not (attention_mask is s_aux is position_bias is None):
        raise NotImplementedError("attention with a mask, a sink or a bias of its own")
    keys, values = layout.arena.data[module.layer_idx]
    keys.index_copy_(0, layout.places, key[0].transpose(0, 1))
    values.index_copy_(0, layout.places, value[0].transpose(0, 1))
    past = Past(keys, values, query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return layout.attend(query[0].transpose(0, 1), past)[None], None


@dataclass(frozen=True, slots=True)
class Pieces(Layout):
    """Any mixture of prompts and single tokens, one sequence after the other."""

    arena: Arena
    places: torch.Tensor
    pieces: tuple[Piece, ...]
    """Of a block each, at most."""

    def attend(self, rows: torch.Tensor, past: Past) -> torch.Tensor:
        """Piece by piece: on a CPU the calls cost less than padding them to one length would."""
        own = rows.split([piece.count for piece in self.pieces])
        parts = [_attended(mine, piece, past) for mine, piece in zip(own, self.pieces, strict=True)]
        return torch.cat(parts).view(rows.shape)


def _attended(rows: torch.Tensor, piece: Piece, past: Past) -> torch.Tensor:
    """What the tokens of one piece gather, as [token, key head, head that shares it, width]."""
    count, heads, width = rows.shape
    shared = past.keys.shape[1]
    first = 0 if past.window is None else max(piece.past + 1 - past.window, 0)
    size, stride = (1, shared, piece.seen - first, width), (0, width, shared * width, 1)
    offset = (piece.start + first) * shared * width
    k = past.keys.as_strided(size, stride, past.keys.storage_offset() + offset)
    v = past.values.as_strided(size, stride, past.values.storage_offset() + offset)
    if count == 1 and past.softcap is None:  # the heads that share a key are so many queries of it
        return scaled_dot_product_attention(rows.view(1, shared, heads // shared, width), k, v, scale=past.scaling)
    mask = _mask(count, piece.seen - first, past.window, rows.dtype, rows.device)
    got = attended(rows.transpose(0, 1)[None], k, v, mask, past.scaling, past.softcap)
    return got[0].transpose(0, 1).reshape(count, shared, heads // shared, width)


def _mask(count: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What the last `count` of `seen` tokens see of them: a part of a table that is made once."""
    size = 1 << (seen + BLOCK).bit_length()
    begin = size - BLOCK - seen + count
    return _table(size, window, dtype, device)[:count, begin : begin + seen]


@lru_cache(maxsize=8)
def _table(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a block at the end of so many tokens, with one more token behind each, adds to its scores: 0 or -inf."""
    seen = torch.ones(BLOCK, size, dtype=dtype, device=device).tril(size - BLOCK)
    return (seen if window is None else seen.triu(size - BLOCK - window + 1)).log()


def attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of [1, head, token, width], where heads may share keys; without a mask, each token sees its past.

    `mask` is added to the scores. Scores that are bounded, as Gemma 2 has them, are written out: nobody has a kernel
    for them everywhere.
    """
    if softcap is None:
        causal, grouped = mask is None and q.shape[2] > 1, q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = torch.tanh(q @ k.transpose(2, 3) * (scaling / softcap)) * softcap
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device).tril().log()
    return (scores + mask).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _no_mask(*_: Any, **__: Any) -> None:
    """Whoever packs sequences into a row says who sees whom."""


def register(name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Make an attention of packed rows known to transformers, which then makes no masks for it."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)


register(NAME, attend)
