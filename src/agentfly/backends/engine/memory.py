"""Memory: how much the cache may take, and how the C library keeps what is freed."""

from __future__ import annotations

import ctypes
import math
import mmap

import psutil  # type: ignore[import-untyped]
import torch

from agentfly.validation import PositiveInt, validate

_KEPT = {-3: 32 << 20, -1: 512 << 20, -2: 64 << 20}
"""For mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD."""


def cache_bytes(asked: int | None, device: torch.device) -> int:
    """Bytes for keys and values; None takes a share of the free memory."""
    if asked is not None:
        count: int = validate("kv_memory", asked, PositiveInt, " (bytes), or None for a share of what is free")
        return count
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * 0.5)
    return min(int(free_memory() * 0.25), 8 << 30)


def free_memory() -> int:
    """Available bytes of this machine's memory, including the page cache."""
    return int(psutil.virtual_memory().available)


def zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros; on a CPU its pages take memory only once they are written."""
    size = math.prod(shape) * like.itemsize
    if not size or like.device.type != "cpu":
        return like.new_zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def retain_freed_memory() -> None:
    """Make glibc keep freed memory: the next step needs it again.

    Otherwise it returns to the kernel after every large operation and comes back as pages that are cleared one by one,
    which is a tenth of the time of long prompts on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, size in _KEPT.items():
            mallopt(option, size)
