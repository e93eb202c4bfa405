"""Attention of a packed batch over the arena: tokens of many sequences in one row, each seeing its own past only.

Registered with transformers under the name `agentfly`. A model that asks the registry for its attention then runs any
mixture of prefill and decode in one forward pass, with its own weights and its own code for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentfly.backends.engine.kv_cache import KVCache

NAME = "agentfly"


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Some tokens of one sequence in the batch."""

    count: int
    start: int
    """Where the sequence begins in the arena."""
    past: int
    """Tokens of the sequence that are in the arena already."""

    @property
    def seen(self) -> int:
        """Tokens that the last of these sees, itself among them."""
        return self.past + self.count


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer has computed so far, and how it is looked at."""

    keys: torch.Tensor
    """[place, head, width]"""
    values: torch.Tensor
    scaling: float
    window: int | None
    """Tokens back that are seen; None: all."""
    softcap: float | None
    """The bound of scores; None: there is none."""


class AttentionLayout(Protocol):
    """Whose tokens are in a batch, and where their keys and values go."""

    arena: KVCache
    places: torch.Tensor
    """The place in the arena of every token of the batch."""

    def attend(self, rows: torch.Tensor, past: LayerCache) -> torch.Tensor:
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
    layout: AttentionLayout,
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
    past = LayerCache(keys, values, query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return layout.attend(query[0].transpose(0, 1), past)[None], None


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """Attention of [sequence, head, token, width], where heads may share keys; `mask` is added to the scores.

    Without one all is seen, or, if `causal`, what came before. Scores that are bounded, as Gemma 2 has them, are
    written out: nobody has a kernel for them everywhere.
    """
    if softcap is None:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
    times = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    scores = torch.tanh(q @ k.transpose(2, 3) * (scaling / softcap)) * softcap
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device).tril().log()
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _no_mask(*_: Any, **__: Any) -> None:
    """Whoever packs sequences into a row says who sees whom."""


def register_attention(name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Make an attention of packed rows known to transformers, which then makes no masks for it."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)


register_attention(NAME, attend)
