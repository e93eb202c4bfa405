"""Attention of a packed batch over the key-value cache: tokens of many sequences in one row, each seeing its own past.

Registered with transformers under the name `agentfly`. A model that asks the registry for its attention then runs any
mixture of prefill and decode in one forward pass, with its own weights and its own code for everything else.

`NativeAttention` is the implementation for a CPU. `DenseAttention` computes the same with torch's operators, for GPUs
where the Triton kernel does not apply and CPUs without a C compiler: one sequence after another, prompts in blocks, as
views of the cache wherever a sequence's slots are adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentfly.backends.engine.kv_cache import KVCache, QuerySpan
from agentfly.backends.engine.native_kernels import MAX_TOKENS, MAX_WIDTH, NativeKernels, SpanTable

NAME = "agentfly"
BLOCK = 64
"""Tokens of a prompt that attend in one call: with more, the kernel computes many scores that are masked."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, and how they are attended to."""

    keys: torch.Tensor
    """[slot, head, width]"""
    values: torch.Tensor
    scaling: float
    window: int | None
    """Size of the sliding window; None: the whole past."""
    softcap: float | None
    """Soft cap of the scores; None: no cap."""


class AttentionLayout(Protocol):
    """Which sequences the tokens of a batch belong to, and where their keys and values are."""

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [head, token, width] into the cache; returns the layer's cached keys and values."""
        ...

    def attend(self, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """Attend from every token to its own past. [head, token, width] in, [token, head, width] out."""
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
    """Write this layer's keys and values into the cache, and attend. Tensors are [1, head, token, width]."""
    if not (attention_mask is s_aux is position_bias is None):
        raise NotImplementedError("attention with a mask, a sink or a bias of its own")
    keys, values = layout.store(key[0], value[0], module.layer_idx)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(query[0], LayerCache(keys, values, scaling, sliding_window, softcap))[None], None


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
    """Attention of [sequence, head, token, width]; query heads may share key heads, and `mask` is added to the scores.

    Without a mask all keys are seen, or, if `causal`, those up to the query's position. Bounded scores (Gemma 2) are
    computed step by step: not every device has a kernel for them.
    """
    if softcap is None:
        grouped = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
    times = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(times, 1)
    v = v.repeat_interleave(times, 1)
    scores = torch.tanh(q @ k.transpose(2, 3) * (scaling / softcap)) * softcap
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device).tril().log()
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def register_attention(name: str, attention: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Register an attention of packed rows with transformers."""
    AttentionInterface.register(name, attention)
    # No mask: the layout of the batch says which tokens see each other. transformers' own would let every token of
    # the packed row see the tokens of the sequences before it.
    AttentionMaskInterface.register(name, lambda *_, **__: None)


register_attention(NAME, attend)


class DenseAttention(AttentionLayout):
    """Any mixture of single tokens and prompts, one sequence after another; prompts in blocks.

    On a CPU that costs less than padding all sequences to one length. Two sequences in one call, as a strided view of
    the cache with a mask, took 1.3 times as long (16 and 32 sequences of 300 to 400 tokens, 9 heads of 64, one thread).
    """

    def __init__(self, kv_cache: KVCache, slots: torch.Tensor, spans: Sequence[QuerySpan]) -> None:
        """`slots`: of every token of the batch."""
        self._kv_cache = kv_cache
        self._slots = slots
        self._blocks = [block for span in spans for block in span.split(BLOCK)]

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        cached_keys, cached_values = self._kv_cache.data[layer]
        cached_keys.index_copy_(0, self._slots, keys.transpose(0, 1))
        cached_values.index_copy_(0, self._slots, values.transpose(0, 1))
        return cached_keys, cached_values

    def attend(self, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        rows = queries.transpose(0, 1).split([block.count for block in self._blocks])
        return torch.cat([_attend_block(*block, cache) for block in zip(rows, self._blocks, strict=True)])


class NativeAttention(DenseAttention):
    """Attention by the native kernel, for a float32 cache on a CPU; torch does soft-capped scores and wide heads."""

    def __init__(
        self, kernels: NativeKernels, kv_cache: KVCache, slots: torch.Tensor, spans: Sequence[QuerySpan]
    ) -> None:
        super().__init__(kv_cache, slots, spans)
        self._kernels = kernels
        self._table = SpanTable([piece for span in spans for piece in span.split(MAX_TOKENS)])

    def attend(self, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        if cache.softcap is not None or queries.shape[2] > MAX_WIDTH:
            return super().attend(queries, cache)
        rows = queries.transpose(0, 1)
        return self._kernels.attend(self._table, rows, cache.keys, cache.values, cache.scaling, cache.window)


def _attend_block(rows: torch.Tensor, block: QuerySpan, cache: LayerCache) -> torch.Tensor:
    """Attention of a block of one sequence. [token, head, width] in and out."""
    count, heads, width = rows.shape
    # Keys outside of the window are left out, not masked: a mask would cost time for the whole past.
    first = 0 if cache.window is None else max(block.past + 1 - cache.window, 0)
    k, v = (
        (
            cached[block.start + first : block.start + block.context_length]
            if block.slots is None
            else cached.index_select(0, block.slots[first:])
        ).transpose(0, 1)[None]  # [1, key head, key, width]
        for cached in (cache.keys, cache.values)
    )
    if count == 1:  # the heads that share a key head are several queries of it: all of them see all keys
        out = attend_dense(rows.reshape(1, k.shape[1], -1, width), k, v, None, cache.scaling, cache.softcap)
        return out.reshape(1, heads, width)
    mask = _mask(count, k.shape[2], cache.window, rows.dtype, rows.device)
    return attend_dense(rows.transpose(0, 1)[None], k, v, mask, cache.scaling, cache.softcap)[0].transpose(0, 1)


def _mask(count: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[token, key] What the last `count` of `seen` tokens add to the scores of all of them: 0 or -inf."""
    hidden = torch.full((count, seen), -torch.inf, dtype=dtype, device=device)
    later = hidden.triu(seen - count + 1)
    return later if window is None else later + hidden.tril(seen - count - window)
