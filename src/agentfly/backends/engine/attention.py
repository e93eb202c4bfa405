"""Attention of a packed batch over the key-value cache: tokens of many sequences in one row, each seeing its own past.

Registered with transformers under the name `agentfly`. A model that asks the registry for its attention then runs any
mixture of prefill and decode in one forward pass, with its own weights and its own code for everything else.

`NativeAttention` is the implementation for a CPU. `DenseAttention` computes the same with torch's operators, for GPUs
where the Triton kernel does not apply and CPUs without a C compiler: single tokens two at a time, prompts in blocks, as
views of the cache wherever a sequence's slots are adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from agentfly.backends.engine.kv_cache import KVCache
from agentfly.backends.engine.native_kernels import MAX_TOKENS, MAX_WIDTH, NativeKernels, NativeSpan, SpanTable

NAME = "agentfly"
BLOCK = 64
"""Tokens of a prompt that attend in one call: with more, the kernel computes many scores that are masked."""


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Consecutive tokens of one sequence in the batch."""

    count: int
    past: int
    """Tokens of the sequence before them."""
    start: int
    """The sequence's first slot, if its slots are adjacent."""
    slots: torch.Tensor | None = None
    """All slots of the sequence up to the last of these tokens, if they are not adjacent."""

    @property
    def context_length(self) -> int:
        """Tokens that the last of these attends to, including itself."""
        return self.past + self.count


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


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """Tokens of the batch that attend in one call: a block of one sequence, or the single tokens of one or two."""

    count: int
    single: bool
    size: tuple[int, ...]
    """Of keys and of values: [sequence, head, token, width]."""
    stride: tuple[int, ...]
    offset: int
    mask: torch.Tensor | None
    slots: torch.Tensor | None
    """The keys to gather, where they are not adjacent: then size and stride are those of what is gathered."""


class DenseAttention(AttentionLayout):
    """Any mixture of single tokens and prompts. Two single tokens are one call where their sequences lie in order.

    Any two sequences are evenly spaced, so that their keys are one view of the cache, as long as the longer of them.
    What the shorter one does not have is masked: it may belong to any sequence, but must be finite.
    """

    def __init__(self, kv_cache: KVCache, slots: torch.Tensor, spans: Sequence[QuerySpan]) -> None:
        """`slots`: of every token of the batch."""
        self._kv_cache = kv_cache
        self._slots = slots
        self._spans = spans
        self._calls: dict[int | None, list[_AttentionCall]] = {}

    def store(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        cached_keys, cached_values = self._kv_cache.data[layer]
        cached_keys.index_copy_(0, self._slots, keys.transpose(0, 1))
        cached_values.index_copy_(0, self._slots, values.transpose(0, 1))
        return cached_keys, cached_values

    def attend(self, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """Call by call: on a CPU that costs less than padding all sequences to one length."""
        if cache.window not in self._calls:
            self._calls[cache.window] = list(self._make_calls(cache.window))
        calls = self._calls[cache.window]
        rows = queries.transpose(0, 1)
        row_groups = rows.split([call.count for call in calls])
        outputs = [_attend_call(group, call, cache) for group, call in zip(row_groups, calls, strict=True)]
        return torch.cat(outputs).view(rows.shape)

    def _make_calls(self, window: int | None) -> Iterator[_AttentionCall]:
        left = list(self._spans)
        while left:
            span = left.pop(0)
            if span.count > 1:
                for begin in range(0, span.count, BLOCK):
                    size = min(BLOCK, span.count - begin)
                    past = span.past + begin
                    slots = None if span.slots is None else span.slots[: past + size]
                    yield self._call([QuerySpan(size, past, span.start, slots)], window)
            elif left and self._are_one_view(span, left[0]):
                yield self._call([span, left.pop(0)], window)
            else:
                yield self._call([span], window)

    def _are_one_view(self, one: QuerySpan, other: QuerySpan) -> bool:
        adjacent = other.count == 1 and one.slots is None and other.slots is None
        fits = other.start + max(one.context_length, other.context_length) <= self._kv_cache.capacity
        return adjacent and fits and one.start < other.start

    def _call(self, spans: Sequence[QuerySpan], window: int | None) -> _AttentionCall:
        """The call for a block of one sequence, or for the single tokens of one or two."""
        data = self._kv_cache.data  # [layer, key or value, slot, key head, width]
        shared, width = data.shape[3:]
        # Keys outside of the window are left out of the view, not masked: a mask would cost time for the whole past.
        hidden = [0 if window is None else max(span.past + 1 - window, 0) for span in spans]
        begin = [span.start + skipped for span, skipped in zip(spans, hidden, strict=True)]
        seen = [span.context_length - skipped for span, skipped in zip(spans, hidden, strict=True)]
        count = sum(span.count for span in spans)
        longest = max(seen)
        single = count == len(spans)
        mask = None
        if not single:
            mask = _mask(count, longest, window, data.dtype, data.device)
        elif min(seen) < longest:
            # The view is as long as the longer sequence: without this mask, the shorter one would attend to the slots
            # behind its own, which another sequence may use. log: 1 becomes 0, 0 becomes -inf.
            mask = torch.tensor(seen, device=data.device)[:, None] > torch.arange(longest, device=data.device)
            mask = mask[:, None, None].to(data.dtype).log()  # [sequence, 1, 1, key]
        slots = spans[0].slots
        if slots is not None:
            slots = slots[hidden[0] :]
            begin = [0]
        # Two sequences are two rows of one strided view: the distance of their first slots is its first stride.
        stride = ((begin[-1] - begin[0]) * shared * width, width, shared * width, 1)
        return _AttentionCall(
            count, single, (len(spans), shared, longest, width), stride, begin[0] * shared * width, mask, slots
        )


class NativeAttention(DenseAttention):
    """Attention by the native kernel, for a float32 cache on a CPU; torch does soft-capped scores and wide heads."""

    def __init__(
        self, kernels: NativeKernels, kv_cache: KVCache, slots: torch.Tensor, spans: Sequence[QuerySpan]
    ) -> None:
        super().__init__(kv_cache, slots, spans)
        self._kernels = kernels
        row = 0
        native = []
        for span in spans:
            for begin in range(0, span.count, MAX_TOKENS):
                count = min(MAX_TOKENS, span.count - begin)
                native.append(NativeSpan(row + begin, count, span.past + begin, span.start, span.slots))
            row += span.count
        self._table = SpanTable(native)

    def attend(self, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        if cache.softcap is not None or queries.shape[2] > MAX_WIDTH:
            return super().attend(queries, cache)
        rows = queries.transpose(0, 1)
        return self._kernels.attend(self._table, rows, cache.keys, cache.values, cache.scaling, cache.window)


def _attend_call(rows: torch.Tensor, call: _AttentionCall, cache: LayerCache) -> torch.Tensor:
    """Attention of the tokens of one call, as [token, key head, query head of it, width]."""
    count, heads, width = rows.shape
    shared = cache.keys.shape[1]
    k, v = (
        (cached if call.slots is None else cached.index_select(0, call.slots)).as_strided(
            call.size, call.stride, (cached.storage_offset() if call.slots is None else 0) + call.offset
        )
        for cached in (cache.keys, cache.values)
    )
    if call.single:  # the heads that share a key head are several queries of it
        q = rows.reshape(count, shared, heads // shared, width)
        return attend_dense(q, k, v, call.mask, cache.scaling, cache.softcap)
    got = attend_dense(rows.transpose(0, 1)[None], k, v, call.mask, cache.scaling, cache.softcap)
    return got[0].transpose(0, 1).reshape(count, shared, heads // shared, width)


def _mask(count: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Which of `seen` tokens the last `count` of them see: a part of a table that is made once."""
    size = 1 << (seen + BLOCK).bit_length()
    begin = size - BLOCK - seen + count
    mask = _mask_table(size, window, dtype, device)[:count, begin : begin + seen]
    return mask if device.type == "cpu" else mask.clone()  # kernels of a GPU read aligned words


@lru_cache(maxsize=8)
def _mask_table(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a block at the end of `size` tokens, with one more token behind each, adds to its scores: 0 or -inf."""
    seen = torch.ones(BLOCK, size, dtype=dtype, device=device).tril(size - BLOCK)
    return (seen if window is None else seen.triu(size - BLOCK - window + 1)).log()
