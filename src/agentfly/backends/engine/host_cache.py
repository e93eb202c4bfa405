"""Host memory for keys and values that the GPU's cache evicts, so that a later turn of the chain copies them back.

Copies are queued behind the steps that were launched before them, on the stream of these steps: a slot is read after it
was written and before it is written again, and no one waits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from agentfly.backends.engine.kv_cache import ContiguousKVCache, KVCache, Slots

_TOKENS_PER_COPY = 1024
"""Tokens gathered on the GPU for one copy: some ten megabytes."""


class HostCache(ContiguousKVCache):
    """Slots in pinned memory. One slot's keys and values of all layers lie together: [slot, layer, 2, head, width]."""

    def __init__(self, kv_cache: KVCache, memory: int) -> None:
        """`memory`: bytes for the values of `kv_cache`."""
        layers, two, _, heads, width = kv_cache.data.shape
        shape = (layers, two, heads, width)
        capacity = memory // max(kv_cache.data[:, :, 0].nbytes, 1)
        pinned = kv_cache.data.is_cuda
        super().__init__(capacity, torch.empty(capacity, *shape, dtype=kv_cache.data.dtype, pin_memory=pinned))
        self._kv_cache = kv_cache

    def save(self, slots: Slots, host_slots: Slots) -> None:
        """Copy slots of the cache here."""
        device = self._kv_cache.data.device
        for copied, begin, end in _runs(host_slots):
            source = torch.from_numpy(slots[copied].astype(np.int64)).to(device, non_blocking=True)
            values = self._kv_cache.data.index_select(2, source)  # [layer, 2, token, head, width]
            self.data[begin:end].copy_(values.permute(2, 0, 1, 3, 4).contiguous(), non_blocking=True)

    def load(self, host_slots: Slots, slots: Slots) -> None:
        """Copy slots of this cache back."""
        device = self._kv_cache.data.device
        for copied, begin, end in _runs(host_slots):
            target = torch.from_numpy(slots[copied].astype(np.int64)).to(device, non_blocking=True)
            values = self.data[begin:end].to(device, non_blocking=True)
            self._kv_cache.data.index_copy_(2, target, values.permute(1, 2, 0, 3, 4))


def _runs(slots: Slots) -> Iterator[tuple[slice, int, int]]:
    """Runs of adjacent slots, of a bounded length: where each lies in `slots`, its first slot, the slot behind it."""
    ends = [*(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for first, last in zip([0, *ends], ends, strict=False):
        for begin in range(first, last, _TOKENS_PER_COPY):
            end = min(begin + _TOKENS_PER_COPY, last)
            yield slice(begin, end), int(slots[begin]), int(slots[end - 1]) + 1
