"""The text of a turn while it is sampled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from agentfly.templates import load_template
from agentfly.templates.tokenizer import load_tokenizer
from tests.scaling import grows_at_most

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT = '<think>Hello, 日本 👩\u200d👩\u200d👧é</think>\n\n  x\t😀\'s {"a": 1}.'


REAL = [pytest.param(name, marks=pytest.mark.integration) for name in ("qwen3", "deepseek_v3", "llama3_1")]


@pytest.mark.parametrize("family", ["bytes", *REAL])
def test_streamed_text_is_the_text_of_the_turn(
    family: str, load_family: Callable[[str], PreTrainedTokenizerFast]
) -> None:
    tokenizer = load_tokenizer("bytes") if family == "bytes" else load_family(family)
    template = load_template("chatml" if family == "bytes" else None, tokenizer)
    ids = [*template.codec.encode(TEXT), template.close_id]
    stream = template.stream()
    deltas = [stream([token]) for token in ids]
    assert deltas[-1] == template.text(ids) == TEXT
    assert all(TEXT.startswith(text) for text in deltas), "an incomplete character is held back"


def test_streaming_a_turn_takes_linear_time() -> None:
    template = load_template("chatml", load_tokenizer("bytes"))

    def cpu_seconds(count: int) -> float:
        ids = template.codec.encode("ab, é. " * count)[:count]
        stream, started = template.stream(), time.process_time()
        for token in ids:
            stream([token])
        return time.process_time() - started

    assert grows_at_most(cpu_seconds, 4000, 8000, ratio=3)
