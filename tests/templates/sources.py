"""Chat templates of families whose tokenizers are not fetched, on a byte tokenizer with their control tokens."""

from __future__ import annotations

import re
from functools import cache

from agentfly.templates import load_template
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import ByteTokenizer
from tests.conftest import load_chat_template
from tests.templates.families import TOOL

_CONTROL = re.compile(
    r"<\|[^<>|\s]*\|>|<｜[^<>｜\s]*｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|\[e~\[|\]~b\]|<SPECIAL_\d+>|<seed:[a-z]+>"
    r"|<(?:start|end)_of_turn>|<(?:beginning|end)_of_sentence>|</?assistant>|<sep>|</?tool_call>|</?think>"
)
_UNWRITTEN = {"LFM2-8B-A1B", "LFM2.5-Instruct", "lfm2", "lfm2_training"}
"""Templates whose tokenizer has tokens around calls that the template does not mention."""


def build_tokenizer(source: str, *tokens: str) -> ByteTokenizer:
    """Build a tokenizer with a chat template, the control tokens in its source, and these."""
    tokenizer = ByteTokenizer()
    added = {*_CONTROL.findall(source), "<s>", "</s>", *tokens} - set(tokenizer.backend_tokenizer.get_vocab())
    tokenizer.backend_tokenizer.add_special_tokens(sorted(added))
    eos = "<｜end▁of▁sentence｜>" if "<｜end▁of▁sentence｜>" in source else "</s>"
    tokenizer.special_tokens_map = {"bos_token": "<s>", "eos_token": eos}
    tokenizer.chat_template = source
    return tokenizer


def load_with_tools(folder: str, name: str) -> Template:
    """Load a fetched template with a tool, following its tokenizer."""
    return _load(name, load_chat_template(folder, name))


@cache
def _load(name: str, source: str) -> Template:
    tokens = ("<|tool_call_start|>", "<|tool_call_end|>") if name in _UNWRITTEN else ()
    return load_template(None, build_tokenizer(source, *tokens), tools=[TOOL])
