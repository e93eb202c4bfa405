"""String arguments of any text come back from the calls that templates write, also text that is JSON itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from agentfly.templates import PARSERS
from agentfly.templates.chat_format import FORMATS
from agentfly.templates.template import Template
from agentfly.templates.tokenizer import ByteTokenizer
from agentfly.tooling import tool
from agentfly.types import Message, ToolCall
from tests.conftest import load_chat_template, load_family, load_trl_template

XML_MARKS = ("<tool_call>", "</tool_call>", "<function=", "</function>", "</parameter>")
GLM_MARKS = ("<tool_call>", "</tool_call>", "</arg_value>")


@dataclass(frozen=True)
class Format:
    """A template, written over a tokenizer of bytes, with the parser of its calls."""

    source: Callable[[], str]
    parser: str
    close: tuple[str, ...]
    stop: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    """Further control tokens."""
    unwritable: tuple[str, ...] = ()
    """Text that ends a call in this format, which has no escapes."""


def read_template(tokenizer: str) -> Callable[[], str]:
    return lambda: str(load_family(tokenizer).chat_template)


def from_trl(name: str) -> Callable[[], str]:
    return lambda: load_trl_template(name)


def from_llama_cpp(name: str) -> Callable[[], str]:
    return lambda: load_chat_template("llama_cpp_templates", name)


_IM_END, _GLM = ("<|im_end|>",), ("<|user|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>")
FORMATS = {
    "chatml": Format(FORMATS["chatml"].jinja, "hermes", _IM_END),
    "llama-3": Format(FORMATS["llama-3"].jinja, "llama-json", ("<|eot_id|>",)),
    "gemma": Format(FORMATS["gemma"].jinja, "gemma", ("<end_of_turn>",)),
    "qwen2_5": Format(read_template("qwen2_5"), "hermes", _IM_END),
    "qwen3": Format(from_trl("qwen3"), "hermes", _IM_END),
    "llama3_2": Format(read_template("llama3_2"), "llama-json", ("<|eot_id|>",)),
    "mistral_nemo": Format(read_template("mistral_nemo"), "mistral", ("</s>",), other=("[TOOL_CALLS]",)),
    "gptoss": Format(
        from_trl("gptoss"), "harmony", ("<|return|>", "<|call|>", "<|end|>"), ("<|return|>", "<|call|>"), _HARMONY
    ),
    "qwen3_5": Format(from_trl("qwen3_5_nothink"), "qwen-xml", _IM_END, unwritable=XML_MARKS),
    "Qwen3-Coder": Format(from_llama_cpp("Qwen3-Coder"), "qwen-xml", _IM_END, unwritable=XML_MARKS),
    "glm4moe": Format(from_trl("glm4moe"), "glm", _GLM, unwritable=GLM_MARKS),
    "GLM-4.6": Format(from_llama_cpp("GLM-4.6"), "glm", _GLM, unwritable=GLM_MARKS),
}


@cache
def _template(name: str) -> Template:
    chat_format, tokenizer = FORMATS[name], ByteTokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([*chat_format.close, *chat_format.other])
    tokenizer.special_tokens_map["eos_token"] = chat_format.close[0]
    return Template(
        tokenizer,
        chat_format.source(),
        close=chat_format.close,
        stop=chat_format.stop,
        parser=PARSERS[chat_format.parser],
        name=name,
    )


@tool
def write_file(path: str, content: str, mode: list[int] | None = None, append: bool = False, size: float = 0) -> None:
    """Write a file."""


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
JSON_TEXT = st.builds(json.dumps, VALUES, indent=st.sampled_from([None, 2]), ensure_ascii=st.booleans())
PIECES = [
    "true",
    "1",
    "null",
    "01",
    "1e5",
    '"quoted"',
    "'",
    "None",
    "NaN",
    " ",
    "\n",
    "\t",
    "<b>",
    "</",
    "{",
    "]",
    "\\",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | JSON_TEXT | st.lists(st.sampled_from(PIECES)).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text='{"debug": true}')
@example(text="[1, 2]")
@example(text=' "quoted"\n')
@example(text="\n\n")
def test_string_argument_round_trip(name: str, text: str) -> None:
    template = _template(name)
    assume(not any(mark in text for mark in (*FORMATS[name].unwritable, *template.codec.control)))
    turn = Message("assistant", "", (ToolCall("write_file", {"path": "a", "content": text}, "call00001"),))
    [call] = template.parse(template.write(turn)).calls
    assert call.problem == ""
    assert write_file.arguments.check(call.arguments) == {"path": "a", "content": text}


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_of_other_types_round_trip(name: str) -> None:
    arguments: dict[str, Any] = {"path": "a", "content": "[1]", "mode": [6, 4], "append": True, "size": 1.5}
    template = _template(name)
    [call] = template.parse(
        template.write(Message("assistant", "", (ToolCall("write_file", arguments, "call00001"),)))
    ).calls
    assert write_file.arguments.check(call.arguments) == arguments
