"""What all tests share: the real tokenizers of model families, and a server on loopback."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.backends.openai_server import OpenAIServer

TOKENIZERS = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers"


@cache
def _load(name: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(TOKENIZERS / name)


def load_family(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a family, loaded once a session; skip the test where it was not fetched."""
    _need(name)
    return _load(name)


def load_trl_template(name: str) -> str:
    """Return a chat template that TRL ships, say `gptoss`; skip the test where it was not fetched."""
    _need("trl_templates")
    return (TOKENIZERS / "trl_templates" / f"{name}.jinja").read_text()


@pytest.fixture(name="load_family", scope="session")
def load_family_fixture() -> Callable[[str], PreTrainedTokenizerFast]:
    return load_family


@pytest.fixture(name="load_trl_template", scope="session")
def load_trl_template_fixture() -> Callable[[str], str]:
    return load_trl_template


def _need(name: str) -> None:
    if not (TOKENIZERS / name / "source.txt").is_file():
        pytest.skip(f"no tokenizer files of {name}: python tests/tokenizers/fetch.py {name}")


@pytest.fixture(scope="module")
def running() -> Iterator[OpenAIServer]:
    """A server that a module's tests share."""
    server = OpenAIServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def openai_server(running: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> OpenAIServer:
    """The server as if it had just been started, and nothing in this process's surroundings that changes the way."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    running.reset()
    return running
