"""Attention on a CPU as native code: a C file that the system's compiler builds on first use.

torch's operators are slow where a few queries share a key head: with them, attention takes twice as long in decoding.
The library is stored in the cache folder under a hash of source, compiler, flags and processor, with its own SHA-256
appended: a truncated or foreign file is built again. Processes that build at once each replace the file
atomically. Without a compiler the engine computes with torch's operators.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentfly.backends.engine.kv_cache import QuerySpan
from agentfly.errors import describe
from agentfly.models.cache import cache_root
from agentfly.threads import find_c_function

_LOG = logging.getLogger(__name__)
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-x", "c", "-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno",
          "-fno-trapping-math", "-fPIC", "-shared", "-")  # fmt: skip
_BUILD_SECONDS = 300
_DIGEST_BYTES = 32
_LEAST_WORK = 1 << 18
"""Multiplications of queries with keys below which one thread does all."""
MAX_WIDTH = 256
"""Largest width of a head."""
MAX_TOKENS = 128
"""Most tokens of a span; work is split over threads by spans and key heads."""
_NO_WINDOW = 1 << 62
_LOCK = threading.Lock()


_POINTERS = ("queries", "keys", "values", "out", "rows", "tokens", "pasts", "starts", "slots")
_INTEGERS = ("spans", "heads", "key_heads", "width", "window", "row_stride", "head_stride")


class _Attention(ctypes.Structure):
    """The struct of the same name in the C file."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("scaling", ctypes.c_float),
        ("next", ctypes.c_int64),
    )


class SpanTable:
    """The spans of a batch, in order and of at most MAX_TOKENS each, as the kernel reads them."""

    def __init__(self, spans: Sequence[QuerySpan]) -> None:
        counts = [span.count for span in spans]
        columns = {
            "rows": np.cumsum([0, *counts[:-1]]),  # index of the first token in the batch
            "tokens": counts,
            "pasts": [span.past for span in spans],
            "starts": [span.start for span in spans],
            "slots": [0 if span.slots is None else span.slots.data_ptr() for span in spans],
        }
        self._data = np.array([*columns.values()], np.int64)
        self._spans = spans  # whose slots the table points to
        self.pointers = {name: column.ctypes.data for name, column in zip(columns, self._data, strict=True)}
        self.size = len(spans)
        self.products = sum(span.count * (span.past + span.count) for span in spans)


class NativeKernels:
    """The functions of the C file."""

    def __init__(self, library: ctypes.CDLL, parallel: Any) -> None:
        """`parallel`: GOMP_parallel of the OpenMP runtime that torch uses."""
        self._attend = library.attend
        self._attend.restype = None
        self._parallel = ctypes.cast(parallel, ctypes.c_void_p)

    def attend(
        self,
        spans: SpanTable,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend from every token of the spans to its own past. All tensors are float32 on the CPU.

        queries, result: [token, head, width]. keys, values: [slot, key head, width], contiguous. `window`: as in
        `LayerCache`.
        """
        if queries.stride(2) != 1:
            queries = queries.contiguous()
        _, heads, width = queries.shape
        key_heads = keys.shape[1]
        out = queries.new_empty(queries.shape)  # loading a model may change torch's default dtype
        work = _Attention(
            queries=queries.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(), out=out.data_ptr(),
            spans=spans.size, heads=heads, key_heads=key_heads, width=width,
            window=_NO_WINDOW if window is None else window, row_stride=queries.stride(0),
            head_stride=queries.stride(1), scaling=scaling, **spans.pointers,
        )  # fmt: skip
        threads = torch.get_num_threads() if spans.products * heads * width >= _LEAST_WORK else 1
        self._attend(ctypes.byref(work), min(threads, spans.size * key_heads), self._parallel)
        return out


def load() -> NativeKernels | None:
    """The kernels, built on first use. If that fails, None, and one warning per process says why."""
    with _LOCK:
        return _load()


@functools.cache
def _load() -> NativeKernels | None:
    try:
        parallel = find_c_function("GOMP_parallel")
        if parallel is None:
            raise OSError("torch's OpenMP runtime has no GOMP_parallel")
        return NativeKernels(ctypes.CDLL(str(build())), parallel)
    except Exception as error:  # torch computes the same, so nothing that goes wrong here may end the run
        _LOG.warning(
            "attention is computed by torch, which is slower with long contexts: its C code could not be compiled or "
            "loaded (%s)", describe(error),
        )  # fmt: skip
        return None


def build() -> Path:
    """The library's file, compiled unless an intact one is in the cache."""
    compiler = _find_compiler()
    source = _SOURCE.read_bytes()
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=_BUILD_SECONDS).stdout
    about = [*compiler, *_FLAGS, platform.machine(), *platform.libc_ver(), _describe_processor()]
    key = hashlib.sha256(b"\0".join([source, version, *map(str.encode, about)])).hexdigest()[:32]
    folder = cache_root().parent / "kernels"
    path = folder / f"{key}.so"
    with contextlib.suppress(FileNotFoundError):
        library = path.read_bytes()
        if hashlib.sha256(library[:-_DIGEST_BYTES]).digest() == library[-_DIGEST_BYTES:]:
            return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        draft = Path(scratch) / path.name
        done = subprocess.run(
            [*compiler, *_FLAGS, "-o", str(draft)], input=source, capture_output=True, timeout=_BUILD_SECONDS
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
            raise OSError(f"{shlex.join(compiler)} failed: {lines[0][:300]}")
        with draft.open("r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
        draft.replace(path)  # in one step: another process that loads it meanwhile must not see half of a file
    return path


def _find_compiler() -> list[str]:
    """The command of the C compiler: $CC, or the first of cc, gcc and clang on PATH."""
    if command := shlex.split(os.environ.get("CC", "")):
        return command
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise OSError("there is no C compiler: CC is not set, and none of cc, gcc and clang is on PATH")


def _describe_processor() -> str:
    """Name and instruction sets: a home directory may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU "))}))
