import pytest

torch = pytest.importorskip("torch")

from agentfly.backends.engine import loading  # noqa: E402


def test_default_precision_on_a_cpu_is_float32_however_fast_bfloat16_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_cpu_is_fast_in_bfloat16", lambda: True)
    assert loading.resolve_dtype(None, torch.device("cpu")) is torch.float32
    assert loading.resolve_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16
    assert loading.bfloat16_is_fast(torch.device("cpu"))
