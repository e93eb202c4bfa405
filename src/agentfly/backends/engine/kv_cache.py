"""The key-value cache: one pool of slots per layer. A slot holds the keys and values of one token.

Every sequence has a table of slots, one per token; slots that several sequences have in common are shared, not copied.
On a GPU slots are handed out in any order and attention reads through the table (`KVCache`). On a CPU attention is
fastest over adjacent slots, so `ContiguousKVCache` hands out runs of them as long as there are any.

Also how much memory the cache may take, and how the C library keeps what is freed.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]
import torch

from agentfly.threads import find_c_function

Slots = npt.NDArray[np.int32]
NO_SLOTS: Slots = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Consecutive tokens of one sequence in a batch, and the slots of what they attend to."""

    count: int
    past: int
    """Tokens of the sequence before them."""
    start: int
    """The sequence's first slot, if its slots are adjacent."""
    slots: torch.Tensor | None = None
    """All slots of the sequence up to the last of these tokens, int64, if they are not adjacent."""

    @property
    def context_length(self) -> int:
        """Tokens that the last of these attends to, including itself."""
        return self.past + self.count

    def split(self, size: int) -> Iterator[QuerySpan]:
        """The same tokens as spans of at most `size` tokens."""
        for begin in range(0, self.count, size):
            count = min(size, self.count - begin)
            slots = None if self.slots is None else self.slots[: self.past + begin + count]
            yield QuerySpan(count, self.past + begin, self.start, slots)


class KVCache:
    """A pool of `capacity` slots, and which of them are free."""

    contiguous = False
    """Whether adjacent slots are preferred for a sequence."""

    def __init__(self, capacity: int, data: torch.Tensor) -> None:
        self.capacity = capacity
        self.data = data
        """[layer, key or value, slot, head, width]; empty for models that keep their own cache.

        All of it is finite, including free slots: attention may read them behind a mask.
        """
        self._stack = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        """The first `free` entries are the free slots."""
        self.free = capacity

    def allocate(self, count: int, last_slot: int | None = None) -> Slots | None:
        """Take `count` free slots; None if there are fewer. `after`: the sequence's last slot so far."""
        if count > self.free:
            return None
        self.free -= count
        # A copy: `release` writes slots of other sequences over this part of the stack.
        return self._stack[self.free : self.free + count].copy()

    def release(self, slots: Slots) -> None:
        """Give slots back."""
        self._stack[self.free : self.free + len(slots)] = slots
        self.free += len(slots)

    def free_slots(self) -> Slots:
        """All free slots, in any order."""
        return self._stack[: self.free]

    def clear_values(self) -> None:
        """Zero the whole pool: removes values that are not finite."""
        self.data.zero_()


class ContiguousKVCache(KVCache):
    """A pool that hands out adjacent slots: directly after the given one, else from the smallest hole that is large
    enough, else in pieces from several holes."""

    contiguous = True

    def __init__(self, capacity: int, data: torch.Tensor) -> None:
        super().__init__(capacity, data)
        self._holes = [(0, capacity)] if capacity else []
        """(start, end) of free slots, sorted, no two of them adjacent."""

    def allocate(self, count: int, last_slot: int | None = None) -> Slots | None:
        if count > self.free:
            return None
        if count == 0:
            return NO_SLOTS
        hole = None
        # Directly behind the sequence, if possible: attention reads a run of slots as a view, others are gathered.
        if last_slot is not None:
            at = bisect.bisect_left(self._holes, (last_slot + 1, 0))
            if at < len(self._holes) and self._holes[at][0] == last_slot + 1 and self._size(at) >= count:
                hole = at
        if hole is None:  # the smallest that fits: cut from any hole, the pool would have none for a long prompt soon
            fitting = [at for at in range(len(self._holes)) if self._size(at) >= count]
            hole = min(fitting, key=self._size) if fitting else None
        if hole is not None:
            return self._take(hole, count)
        pieces = []  # no hole is large enough: the largest ones, so that they are few
        while count:
            largest = max(range(len(self._holes)), key=self._size)
            pieces.append(self._take(largest, min(count, self._size(largest))))
            count -= len(pieces[-1])
        return np.concatenate(pieces)

    def allocate_run(self, count: int) -> Slots | None:
        """Take adjacent slots; None if there is no hole of that size."""
        if not any(self._size(at) >= count for at in range(len(self._holes))):
            return None
        return self.allocate(count)

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy keys and values of all layers; `target` is a run that `source` does not overlap."""
        if self.data.numel():
            if not len(source):
                return
            # Run by run: an indexed copy would gather all keys and values into a second tensor first.
            ends = [*(np.flatnonzero(np.diff(source) != 1) + 1).tolist(), len(source)]
            for begin, end in zip([0, *ends], ends, strict=False):
                of, to = int(source[begin]), int(target[begin])
                self.data[:, :, to : to + end - begin] = self.data[:, :, of : of + end - begin]

    def release(self, slots: Slots) -> None:
        self.free += len(slots)
        slots = np.sort(slots)
        for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
            if not len(run):
                continue
            start = int(run[0])
            end = int(run[-1]) + 1
            at = bisect.bisect_left(self._holes, (start, end))
            # Merged with the holes on both sides: apart, neither would have room for a run that fits into all of them.
            if at < len(self._holes) and self._holes[at][0] == end:
                end = self._holes.pop(at)[1]
            if at and self._holes[at - 1][1] == start:
                at -= 1
                start = self._holes.pop(at)[0]
            self._holes.insert(at, (start, end))

    def free_slots(self) -> Slots:
        return np.concatenate([NO_SLOTS, *(np.arange(start, end, dtype=np.int32) for start, end in self._holes)])

    def _size(self, hole: int) -> int:
        start, end = self._holes[hole]
        return end - start

    def _take(self, hole: int, count: int) -> Slots:
        start, end = self._holes[hole]
        if start + count == end:
            del self._holes[hole]
        else:
            self._holes[hole] = (start + count, end)
        self.free -= count
        return np.arange(start, start + count, dtype=np.int32)


_KEPT = {-3: 32 << 20, -1: 512 << 20, -2: 64 << 20}
"""For mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD."""


def default_cache_bytes(device: torch.device) -> int:
    """Bytes for keys and values: a share of the free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.5)  # the other half: activations, CUDA graphs and, while training, the learner
    return min(int(free_memory() * 0.25), 8 << 30)


def free_memory() -> int:
    """Available bytes of this machine's memory, including the page cache."""
    return int(psutil.virtual_memory().available)


def zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros; on a CPU its pages take memory only once they are written."""
    size = math.prod(shape) * like.itemsize
    if not size or like.device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def retain_freed_memory() -> None:
    """Make glibc keep freed memory: the next step needs it again.

    Otherwise it returns to the kernel after every large operation and comes back as pages that are cleared one by one,
    which is a tenth of the time of long prompts on a CPU.
    """
    mallopt = find_c_function("mallopt")
    if mallopt is not None:
        for option, size in _KEPT.items():
            mallopt(option, size)
