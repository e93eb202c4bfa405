"""Real tokenizers with the templates of their family, and Hugging Face's own rendering to compare with."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from agentfly.templates import load_template
from agentfly.templates.audit import Audit, audit
from agentfly.templates.template import Template
from agentfly.types import Message, ToolCall
from tests.conftest import load_family, load_trl_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TODAY = datetime.date.today()
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


@dataclass(frozen=True)
class Case:
    """A tokenizer with a template."""

    tokenizer: str
    trl: str = ""
    """The template TRL ships under this name; empty: the tokenizer's own."""
    tools: bool = False
    """The template can show tools."""
    system: bool = True
    """The template takes a system message."""
    string_arguments: bool = False
    """The template wants the arguments of calls as a string."""

    def __str__(self) -> str:
        return f"{self.tokenizer}-{self.trl}" if self.trl else self.tokenizer

    @property
    def hf(self) -> PreTrainedTokenizerFast:
        return load_family(self.tokenizer)

    @property
    def source(self) -> str:
        source = load_trl_template(self.trl) if self.trl else self.hf.chat_template
        return source["default"] if isinstance(source, dict) else source

    @property
    def template(self) -> Template:
        """Loaded by following the tokenizer, with a tool where the template can show one."""
        return _template(self)

    @property
    def audit(self) -> Audit:
        """The audit of the template."""
        return _audit(self)

    @contextmanager
    def follow(self) -> Iterator[PreTrainedTokenizerFast]:
        """The tokenizer, for as long as it carries this case's template."""
        source = self.hf.chat_template
        self.hf.chat_template = self.source if self.trl else source
        try:
            yield self.hf
        finally:
            self.hf.chat_template = source

    def render(self, messages: Sequence[Message], open_turn: bool = True) -> str:
        """Hugging Face's rendering."""
        titles = []
        for message in messages:
            out = message.to_dict()
            if message.thinking:
                out["thinking"] = message.thinking
            for call in out.get("tool_calls", ()) if self.string_arguments else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            titles.append(out)
        return str(
            self.hf.apply_chat_template(
                titles,
                tools=[TOOL] if self.tools else None,
                chat_template=self.source,
                add_generation_prompt=open_turn,
                tokenize=False,
            )
        )

    def spells_control_token(self, *texts: str) -> bool:
        """Some text spells a control token: there we differ from Hugging Face on purpose."""
        return any(token in text for text in texts for token in self.template.codec.control)

    def encode(self, text: str) -> list[int]:
        """Hugging Face's ids."""
        return list(self.hf.encode(text, add_special_tokens=False))


@cache
def _template(case: Case) -> Template:
    with case.follow() as tokenizer:
        return load_template(None, tokenizer, tools=[TOOL] if case.tools else (), today=TODAY)


@cache
def _audit(case: Case) -> Audit:
    return audit(case.template)


CASES = [
    Case("smollm2"),
    Case("qwen2_5", tools=True),
    Case("qwen3", tools=True),
    Case("qwen3", "qwen3_training", tools=True),
    Case("qwen3", "qwen3_instruct_2507", tools=True),
    Case("llama3_1"),
    Case("llama3_2", tools=True),
    Case("mistral_nemo", tools=True),
    Case("gemma2", "gemma", system=False),
    Case("gemma3"),
    Case("deepseek_v3"),
    Case("deepseek_v3", "deepseekv3", string_arguments=True),
    Case("gptoss", "gptoss", tools=True),
    Case("command_r_plus"),
    Case("internlm2"),
]
BY_NAME = {str(case): case for case in CASES}


def user(text: str) -> Message:
    return Message("user", text)


def call(number: int = 1, **arguments: Any) -> ToolCall:
    return ToolCall("search", arguments or {"q": "a"}, f"call{number:05d}")


def answer(text: str, number: int = 1) -> Message:
    return Message("tool", text, name="search", tool_call_id=f"call{number:05d}")


def delta_of(kind: str, texts: Sequence[str]) -> tuple[Message, list[Message]]:
    """An assistant turn, and a delta of this kind that may follow it."""
    if kind == "nothing":
        return Message("assistant", "ok"), []
    if kind == "user":
        return Message("assistant", "ok"), [user(texts[0])]
    answers = [answer(texts[0], 1), answer(texts[1], 2)][: 2 if kind.startswith("tools") else 1]
    turn = Message("assistant", "", tuple(call(i + 1) for i in range(len(answers))))
    return turn, [*answers, *([user(texts[2])] if kind.endswith("user") else [])]


KINDS = ("nothing", "user", "tool", "tools", "tool, user", "tools, user")

_AWKWARD = st.sampled_from([
    "", " ", "\n", "\n\n", "\t x", " \n ", "é", "e\u0301", "日本語", "👩‍👩‍👧", "\u200b", "\ufeffx", "\x00", "7", "{}",
    "null", "True", '{"a": [1, "b"]}', "'s don't", "\\n", '"', "a  b", "```", "user", "assistant\n", "<tools>",
    "<h1>a</h1>", "<", "<|", "[", "[IN", "</think", "<fim_prefix>",
])  # fmt: skip
texts = st.lists(st.one_of(_AWKWARD, st.text(max_size=12), st.text("ab \n<|>_", max_size=8)), max_size=4).map("".join)
