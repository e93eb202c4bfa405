from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def pack_small_models() -> Iterator[None]:
    """The small models of these tests are packed as large ones are."""
    pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly-rl[train]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentfly.backends.engine.packed_linear._LEAST_WEIGHTS", 1)
        yield
