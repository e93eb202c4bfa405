"""The native kernel: equal to attention by torch; built once, again if damaged, and replaced by torch if that fails."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")

from agentfly.backends.engine import native_kernels  # noqa: E402
from agentfly.backends.engine.kv_cache import QuerySpan  # noqa: E402
from agentfly.backends.engine.native_kernels import NativeKernels, SpanTable  # noqa: E402

torch.set_num_threads(1)  # on a busy machine, threads wait for each other for minutes

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler: apt install gcc"
)


UNOPTIMIZED = tuple(flag.replace("-O3", "-O0") for flag in native_kernels._FLAGS)


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    loaded = native_kernels.load()
    assert loaded is not None
    return loaded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder. Libraries are built without optimization, which takes most of the time of a build."""
    monkeypatch.setattr(native_kernels, "_FLAGS", UNOPTIMIZED)
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path / "kernels"


@pytest.fixture
def load_again() -> Iterator[Callable[[], NativeKernels | None]]:
    """`load` as in a new process."""

    def load() -> NativeKernels | None:
        native_kernels._load.cache_clear()
        return native_kernels.load()

    yield load
    native_kernels._load.cache_clear()


def attend_with_torch(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """[token, head, width], and [key, key head, width] twice: attention of the last tokens of a sequence.

    In double precision: two results in float32 differ by rounding.
    """
    count, heads, _ = rows.shape
    positions = torch.arange(len(keys) - count, len(keys))[:, None]
    at = torch.arange(len(keys))
    seen = (at <= positions) & (at > positions - (len(keys) if window is None else window))
    q, k, v = (tensor.double().transpose(0, 1) for tensor in (rows, keys, values))
    k, v = (tensor.repeat_interleave(heads // len(k), 0) for tensor in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
    return out.transpose(0, 1).float()


COUNT = st.one_of(st.just(1), st.integers(1, native_kernels.MAX_TOKENS))
PAST = st.one_of(st.integers(0, 200), st.integers(0, 2000))


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(COUNT, PAST, st.booleans()), min_size=1, max_size=5),
    st.integers(1, 4), st.integers(1, 9), st.sampled_from([8, 20, 32, 64, 80, 128, 256]), st.integers(1, 3),
    st.sampled_from([None, 1, 30, 64, 700]), st.sampled_from([0.1, 1.0, 5.0]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_attention_equals_that_of_torch(
    kernels, spans, key_heads, group, width, threads, window, sharpness, random
) -> None:
    """Single tokens and prompts, adjacent and scattered slots; scores that are all alike, and that one dominates."""
    torch.manual_seed(random.randrange(1 << 30))
    scaling = sharpness * width**-0.5
    capacity = max(count + past for count, past, _ in spans) + 10
    keys, values = torch.randn(2, capacity, key_heads, width)
    rows = torch.randn(key_heads * group, sum(count for count, _, _ in spans), width).transpose(0, 1)
    table = []
    right = []
    row = 0
    for count, past, scattered in spans:
        start = random.randrange(10)
        slots = torch.randperm(capacity)[: count + past] if scattered else None
        table.append(QuerySpan(count, past, start, slots))
        seen = slice(start, start + past + count) if slots is None else slots
        right.append(attend_with_torch(rows[row : row + count], keys[seen], values[seen], scaling, window))
        row += count
    initial_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = kernels.attend(SpanTable(table), rows, keys, values, scaling, window)
    finally:
        torch.set_num_threads(initial_threads)
    torch.testing.assert_close(got, torch.cat(right), atol=2e-5, rtol=2e-5)


@needs_compiler
@pytest.mark.parametrize("width", [8, 64])
def test_sequence_has_the_same_result_in_every_batch(kernels, width: int) -> None:
    keys, values = torch.randn(2, 3000, 3, width)
    rows = torch.randn(47, 9, width)
    spans = [QuerySpan(1, 300 + 17 * row, 100 * row) for row in range(7)]
    spans.append(QuerySpan(40, 100, 0))
    together = kernels.attend(SpanTable(spans), rows, keys, values, 0.1, None)
    for row, span in enumerate(spans):
        span_rows = slice(row, row + span.count)
        alone = kernels.attend(SpanTable([span]), rows[span_rows], keys, values, 0.1, None)
        assert torch.equal(alone, together[span_rows])


@needs_compiler
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("count", [1, 9])
def test_values_that_are_not_finite_stay_visible(kernels, broken: float, where: str, count: int) -> None:
    keys, values = torch.randn(2, 200, 1, 64)
    rows = torch.rand(2 * count, 1, 64)
    {"query": rows[count - 1], "key": keys[70], "value": values[70]}[where][0, 3] = broken
    spans = [QuerySpan(count, 190, 0), QuerySpan(count, 50, 0)]
    out = kernels.attend(SpanTable(spans), rows, keys, values, 0.1, None)
    assert not out[count - 1].isfinite().all()
    assert out[count:].isfinite().all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_does_not_matter(kernels, dtype: torch.dtype) -> None:
    """transformers sets it, for all threads, while it loads a model."""
    keys, values = torch.randn(2, 9, 1, 64)
    rows = torch.randn(1, 1, 64)
    spans = SpanTable([QuerySpan(1, 8, 0)])
    right = kernels.attend(spans, rows, keys, values, 0.1, None)
    initial_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = kernels.attend(spans, rows, keys, values, 0.1, None)
    finally:
        torch.set_default_dtype(initial_dtype)
    assert got.dtype == torch.float32
    assert torch.equal(got, right)


@needs_compiler
def test_library_is_built_once(cache: Path, load_again) -> None:
    assert load_again() is not None
    (built,) = cache.iterdir()
    first = built.stat()
    assert load_again() is not None
    assert [*cache.iterdir()] == [built]
    assert (built.stat().st_ino, built.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


@needs_compiler
@pytest.mark.parametrize("damage", [lambda _: b"", lambda data: data[: len(data) // 2], lambda _: b"\x7fELF" * 99])
def test_damaged_library_is_built_again(cache: Path, load_again, damage) -> None:
    built = native_kernels.build()
    data = built.read_bytes()
    draft = cache / "draft"  # a new file: this process may have loaded the other one
    draft.write_bytes(damage(data))
    draft.replace(built)
    assert load_again() is not None
    assert built.read_bytes() == data


@needs_compiler
def test_another_source_is_another_library(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = native_kernels.build()
    changed = tmp_path / "changed.c"
    changed.write_bytes(native_kernels._SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native_kernels, "_SOURCE", changed)
    assert native_kernels.build() != first


LOAD = f"""
from agentfly.backends.engine import native_kernels
native_kernels._FLAGS = {UNOPTIMIZED}
print(native_kernels.load())
"""


@needs_compiler
def test_processes_build_at_once(cache: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert all("NativeKernels" in line for line in printed), printed
    assert len([*cache.iterdir()]) == 1


def write_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_missing_compiler_is_logged_once(cache, load_again, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with caplog.at_level(logging.WARNING):
        assert load_again() is None
        assert native_kernels.load() is None
    (record,) = caplog.records
    assert "there is no C compiler" in record.getMessage()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("echo first error >&2; exit 1", "failed: first error"),
        ("exit 3", "failed: exit code 3"),
        ("exit 0", "No such file"),  # writes nothing
    ],
)
def test_failing_compiler_is_logged(
    cache, load_again, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, program: str, reason: str
) -> None:
    monkeypatch.setenv("CC", write_program(tmp_path / "my-cc", program))
    with caplog.at_level(logging.WARNING):
        assert load_again() is None
    assert reason in caplog.text
    assert [*cache.iterdir()] == []


def test_compiler_that_does_not_exist_is_logged(cache, load_again, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("CC", "/nonexistent/cc -m64")
    with caplog.at_level(logging.WARNING):
        assert load_again() is None
    assert "/nonexistent/cc" in caplog.text


@needs_compiler
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CC", "cc '", "No closing quotation"),
        ("CC", "cc -fvisibility=hidden", "undefined symbol: attend"),
        ("AGENTFLY_CACHE", "~no-such-user/cache", "Could not determine home directory"),
    ],
)
def test_failure_that_is_no_os_error_is_logged(
    cache, load_again, monkeypatch: pytest.MonkeyPatch, caplog, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING):
        assert load_again() is None
    assert reason in caplog.text


@needs_compiler
def test_cache_that_cannot_be_written_is_logged(load_again, tmp_path: Path, monkeypatch, caplog) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert load_again() is None
    assert os.fspath(tmp_path / "file") in caplog.text


@needs_compiler
def test_variable_cc_names_the_compiler_and_its_options(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CC", write_program(tmp_path / "my-cc", f'echo "$@" >> {tmp_path}/calls; exec cc "$@"') + " -g0")
    native_kernels.build()
    version, compile_ = (tmp_path / "calls").read_text().splitlines()
    assert version == "-g0 --version"
    assert compile_.startswith("-g0 -x c")
