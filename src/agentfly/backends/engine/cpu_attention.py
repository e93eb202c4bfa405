"""Attention on a CPU: single tokens two at a time, prompts block by block, each where its keys lie in the arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from agentfly.backends.engine.attention import AttentionLayout, LayerCache, QuerySpan, attend_dense
from agentfly.backends.engine.kv_cache import KVCache

BLOCK = 64
"""Tokens of a prompt that look at their past in one call: of more, the kernel computes much that none of them sees."""


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """Tokens of the batch that gather in one call: a block of one sequence, or the single tokens of one or two."""

    count: int
    single: bool
    size: tuple[int, ...]
    """Of keys and of values: [sequence, head, token, width]."""
    stride: tuple[int, ...]
    offset: int
    mask: torch.Tensor | None


class CPUAttention(AttentionLayout):
    """Any mixture of single tokens and prompts. Two single tokens are one call where they stand in order of place.

    Any two sequences are evenly spaced, so that their keys are one view of the arena, as long as the longer of them.
    What the shorter one does not have is masked: it may be anybody's, but must be finite.
    """

    def __init__(self, arena: KVCache, places: torch.Tensor, pieces: Sequence[QuerySpan]) -> None:
        self.arena, self.places, self._pieces = arena, places, pieces
        self._calls: dict[int | None, list[_AttentionCall]] = {}

    def attend(self, rows: torch.Tensor, past: LayerCache) -> torch.Tensor:
        """Call by call: on a CPU that costs less than padding all to one length would."""
        if past.window not in self._calls:
            self._calls[past.window] = list(self._make_calls(past.window))
        calls = self._calls[past.window]
        own = rows.split([call.count for call in calls])
        return torch.cat([_attend_call(mine, call, past) for mine, call in zip(own, calls, strict=True)]).view(
            rows.shape
        )

    def _make_calls(self, window: int | None) -> Iterator[_AttentionCall]:
        left = list(self._pieces)
        while left:
            piece = left.pop(0)
            if piece.count > 1:
                for begin in range(0, piece.count, BLOCK):
                    size = min(BLOCK, piece.count - begin)
                    yield self._call([QuerySpan(size, piece.start, piece.past + begin)], window)
            elif left and left[0].count == 1 and self._are_one_view(piece, left[0]):
                yield self._call([piece, left.pop(0)], window)
            else:
                yield self._call([piece], window)

    def _are_one_view(self, one: QuerySpan, other: QuerySpan) -> bool:
        return one.start < other.start and other.start + max(one.seen, other.seen) <= self.arena.capacity

    def _call(self, pieces: Sequence[QuerySpan], window: int | None) -> _AttentionCall:
        """A block, or single tokens."""
        data = self.arena.data
        shared, width = data.shape[3:]
        first = [0 if window is None else max(piece.past + 1 - window, 0) for piece in pieces]
        begin = [piece.start + skipped for piece, skipped in zip(pieces, first, strict=True)]
        seen = [piece.seen - skipped for piece, skipped in zip(pieces, first, strict=True)]
        count, most = sum(piece.count for piece in pieces), max(seen)
        single, mask = count == len(pieces), None
        if not single:
            mask = _mask(count, most, window, data.dtype, data.device)
        elif min(seen) < most:
            mask = torch.tensor(seen, device=data.device)[:, None] > torch.arange(most, device=data.device)
            mask = mask[:, None, None].to(data.dtype).log()
        stride = ((begin[-1] - begin[0]) * shared * width, width, shared * width, 1)
        return _AttentionCall(
            count, single, (len(pieces), shared, most, width), stride, begin[0] * shared * width, mask
        )


def _attend_call(rows: torch.Tensor, call: _AttentionCall, past: LayerCache) -> torch.Tensor:
    """What the tokens of one call gather, as [token, key head, head that shares it, width]."""
    count, heads, width = rows.shape
    shared = past.keys.shape[1]
    k, v = (
        each.as_strided(call.size, call.stride, each.storage_offset() + call.offset)
        for each in (past.keys, past.values)
    )
    if call.single:  # the heads that share a key are so many queries of it
        q = rows.view(count, shared, heads // shared, width)
        return attend_dense(q, k, v, call.mask, past.scaling, past.softcap)
    got = attend_dense(rows.transpose(0, 1)[None], k, v, call.mask, past.scaling, past.softcap)
    return got[0].transpose(0, 1).reshape(count, shared, heads // shared, width)


def _mask(count: int, seen: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What the last `count` of `seen` tokens see of them: a part of a table that is made once."""
    size = 1 << (seen + BLOCK).bit_length()
    begin = size - BLOCK - seen + count
    mask = _table(size, window, dtype, device)[:count, begin : begin + seen]
    return mask if device.type == "cpu" else mask.clone()  # a GPU reads whole words, from where one begins


@lru_cache(maxsize=8)
def _table(size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a block at the end of so many tokens, with one more token behind each, adds to its scores: 0 or -inf."""
    seen = torch.ones(BLOCK, size, dtype=dtype, device=device).tril(size - BLOCK)
    return (seen if window is None else seen.triu(size - BLOCK - window + 1)).log()
