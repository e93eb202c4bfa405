from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def packed() -> Iterator[None]:
    """The small models of these tests are packed as large ones are."""
    pytest.importorskip("torch", reason="the embedded engine needs torch: pip install 'agentfly[train]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentfly.backends.transformers.packing._LEAST_WEIGHTS", 1)
        yield
