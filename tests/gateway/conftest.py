"""The clients of OpenAI and Anthropic, imported by the first test that uses them: each takes a second."""

from typing import Any

import pytest


@pytest.fixture(scope="session")
def openai() -> Any:
    return pytest.importorskip("openai", reason="needs openai: pip install 'agentfly-rl[agents]'")


@pytest.fixture(scope="session")
def anthropic() -> Any:
    return pytest.importorskip("anthropic", reason="needs anthropic: pip install 'agentfly-rl[agents]'")
