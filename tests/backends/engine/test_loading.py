import pytest

torch = pytest.importorskip("torch")

from agentfly.backends.engine import loading  # noqa: E402
from agentfly.errors import ConfigError  # noqa: E402


def test_default_precision_on_a_cpu_is_float32_however_fast_bfloat16_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_cpu_is_fast_in_bfloat16", lambda: True)
    assert loading.resolve_dtype(None, torch.device("cpu")) is torch.float32
    assert loading.resolve_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16
    assert loading.bfloat16_is_fast(torch.device("cpu"))


def test_default_device_is_a_gpu_of_cuda_before_one_of_apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert loading.resolve_device(None).type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loading.resolve_device(None).type == "cuda"


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_gpu_that_is_absent_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device='{name}', but torch .* sees no GPU here; write device='cpu'"):
        loading.resolve_device(name)
