"""What all tests share: the real tokenizers of model families."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

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
