"""Memory of the KV cache where another process takes memory at the same time. The fakes stand for a GPU."""

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentfly.backends.engine import kv_cache, loading  # noqa: E402
from agentfly.backends.engine.model_runner import ModelRunner  # noqa: E402
from agentfly.errors import ConfigError  # noqa: E402
from tests.backends.engine.tiny import backend_of, make_request, model_of  # noqa: E402

MIB = 1 << 20


class BusyDevice:
    """Free memory that another process takes while the cache is allocated."""

    def __init__(self, *free: int) -> None:
        self.free = list(free)
        """What is free at each measurement; a cache gets a quarter of it."""
        self.attempts: list[int] = []
        self.available = 0
        """What an allocation may take."""

    def measure(self) -> int:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> BusyDevice:
    device = BusyDevice(64 * MIB, 16 * MIB)
    build_cache = ModelRunner._build_cache

    def build(runner: ModelRunner, capacity: int, shape: tuple[int, ...], like: Any) -> Any:
        size = torch.Size(shape).numel() * like.itemsize
        if size > MIB:  # not the probe whether the model can be packed
            device.attempts.append(size)
        if size > max(device.available, MIB):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.\nSee documentation")
        return build_cache(runner, capacity, shape, like)

    monkeypatch.setattr(kv_cache, "free_memory", device.measure)
    monkeypatch.setattr(ModelRunner, "_build_cache", build)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (3 << 30, 80 << 30))
    return device


async def test_cache_takes_what_another_process_leaves(device: BusyDevice, caplog: pytest.LogCaptureFixture) -> None:
    device.available = 4 * MIB
    with caplog.at_level(logging.WARNING):
        backend = backend_of(model_of(), kv_memory=None)
    assert len(device.attempts) == 2
    assert device.attempts[1] <= 4 * MIB < device.attempts[0]
    assert "the KV cache did not fit, trying with what is free now" in caplog.text
    assert (await backend.generate(make_request([5, 6, 7]))).token_ids
    await backend.close()


@pytest.mark.parametrize(("kv_memory", "attempts"), [(None, 3), (8 * MIB, 1)])
def test_cache_that_never_fits_is_one_line_with_the_numbers(
    device: BusyDevice, kv_memory: int | None, attempts: int
) -> None:
    with pytest.raises(ConfigError, match=r"does not fit on cpu: 3\.0 of 80\.0 GiB are free; .*--kv-memory 2GiB"):
        backend_of(model_of(), kv_memory=kv_memory)
    assert len(device.attempts) == attempts


@pytest.mark.usefixtures("device")
def test_weights_that_do_not_fit_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "load_model", load)
    with pytest.raises(ConfigError, match=r"the weights of .* do not fit on cpu: 3\.0 of 80\.0 GiB are free"):
        backend_of(str(tmp_path))
