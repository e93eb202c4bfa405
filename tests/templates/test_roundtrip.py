"""The parser of a template is one that parses the calls it renders; a template without one is refused with tools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentfly.agents import HFAgent
from agentfly.errors import ConfigError, TemplateError
from agentfly.templates import PARSERS, load_template, register_template
from agentfly.templates.chat_format import FORMATS
from agentfly.templates.check import CheckMark, check
from agentfly.templates.tokenizer import ByteTokenizer
from agentfly.tools import calculate
from agentfly.types import Message
from tests.conftest import load_chat_template
from tests.templates.families import TOOL, call

CHAT = FORMATS["chatml"].jinja()


def tokenizer_with(source: str) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = source
    return tokenizer


def chatml_with_calls(written: str) -> str:
    """ChatML whose calls are written by other Jinja."""
    start = CHAT.index('{{- "<tool_call>')
    return CHAT[:start] + written + CHAT[CHAT.index("{%- endfor %}", start) :]


XML_CALL = (
    "{{- '<tool_call>\\n<function=' ~ call.function.name ~ '>\\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{- '<parameter=' ~ key ~ '>\\n' ~ (value if value is string else value | tojson) ~ '\\n</parameter>\\n' }}"
    "{% endfor %}{{- '</function>\\n</tool_call>' }}"
)
UNKNOWN_CALL = "{{- '<<' ~ call.function.name ~ '|' ~ (call.function.arguments | tojson) ~ '>>' }}"


def test_chatml_that_writes_xml_calls_gets_the_xml_parser() -> None:
    template = load_template(None, tokenizer_with(chatml_with_calls(XML_CALL)), tools=[TOOL])
    assert template.parser is PARSERS["qwen-xml"]


@pytest.mark.parametrize("name", [None, "qwen3-coder"])
def test_calls_of_qwen3_coder_are_parsed(name: str | None) -> None:
    tokenizer = tokenizer_with(load_chat_template("llama_cpp_templates", "Qwen3-Coder"))
    if name:  # the family of its alias asks for this token
        tokenizer.backend_tokenizer.add_special_tokens(["<think>"])
    template = load_template(name, tokenizer, tools=[TOOL])
    turn = Message("assistant", "I look.", (call(1, q="a\nb"), call(2, q="c")))
    reply = template.parse(template.write(turn))
    assert [(call.name, call.arguments, call.problem) for call in reply.calls] == [
        ("search", {"q": "a\nb"}, ""),
        ("search", {"q": "c"}, ""),
    ]
    assert reply.message.text == "I look."


def test_calls_that_no_parser_parses_are_rejected_with_tools() -> None:
    tokenizer = tokenizer_with(chatml_with_calls(UNKNOWN_CALL))
    with pytest.raises(
        ConfigError, match=r"cannot be used with tools: no parser parses a call .*<<search\|.*ReactAgent"
    ):
        load_template(None, tokenizer, tools=[TOOL])
    template = load_template(None, tokenizer)
    assert "no parser parses" in template.parser_problem
    with pytest.raises(TemplateError, match="of 1 calls 0 are parsed back"):
        template.write(Message("assistant", "", (call(),)))


def test_calls_that_the_template_does_not_write_are_rejected_with_tools() -> None:
    with pytest.raises(ConfigError, match="it writes turns without their calls"):
        load_template(None, tokenizer_with(chatml_with_calls("")), tools=[TOOL])


def test_stop_token_before_the_call_is_rejected_with_tools() -> None:
    source = chatml_with_calls("{{- '<|im_end|>' ~ call.function.name ~ (call.function.arguments | tojson) }}")
    with pytest.raises(ConfigError, match="a stop token comes before the call"):
        load_template(None, tokenizer_with(source), tools=[TOOL])


def test_format_whose_parser_does_not_parse_its_calls_is_rejected_when_the_agent_is_built() -> None:
    register_template(replace(FORMATS["chatml"], name="test-wrong-parser", parser="mistral"))
    settings = {"template": "test-wrong-parser", "backend": "scripted", "backend_config": {"script": ["a"]}}
    with pytest.raises(ConfigError, match=r"its parser 'mistral' does not parse a call .*template='.*'chatml'.* does"):
        HFAgent(tools=[calculate], **settings)
    HFAgent(tools=[], **settings)


def test_check_reports_calls_that_are_not_parsed() -> None:
    findings = {f.property: f for f in check(tokenizer_with(chatml_with_calls(UNKNOWN_CALL))).findings}
    assert findings["tools"].mark is CheckMark.BAD
    assert "cannot be used with tools" in findings["tools"].detail
    assert findings["parser"].mark is CheckMark.BAD
    assert "no parser parses a call" in findings["parser"].detail
    findings = {f.property: f for f in check(tokenizer_with(CHAT)).findings}
    assert (findings["parser"].mark, findings["tools"].mark) == (CheckMark.GOOD, CheckMark.GOOD)


def test_llama_3_writes_text_and_calls_that_it_parses() -> None:
    tokenizer = ByteTokenizer()
    tokens = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.backend_tokenizer.add_special_tokens(tokens)
    template = load_template("llama-3", tokenizer, tools=[TOOL])
    reply = template.parse(template.write(Message("assistant", "I look.", (call(1), call(2)))))
    assert [call.problem for call in reply.calls] == ["", ""]


WITHOUT_GENERATION_PROMPT = """
{%- if tools %}{{- 'Tools: ' + (tools | tojson) + '<|endoftext|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- 'User: ' + message.content + '<|endoftext|>' }}
{%- elif message.role == 'tool' %}{{- 'Result: ' + message.content + '<|endoftext|>' }}
{%- elif message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '<tool_call>' + '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}' }}
{{- '</tool_call>' }}
{%- endfor %}{{- '<|endoftext|>' }}
{%- else %}{{- 'Assistant: ' + message.content + '<|endoftext|>' }}
{%- endif %}
{%- endfor %}"""
"""As in Hunyuan's format, the model writes its role before an answer, but not before a call."""


def test_role_that_the_model_writes_is_no_content() -> None:
    template = load_template(None, tokenizer_with(WITHOUT_GENERATION_PROMPT), tools=[TOOL])
    assert template.reply_prefix == "Assistant: "
    assert template.parse_text("Assistant: 42").message == Message("assistant", "42")
    assert template.parse_text("42").message == Message("assistant", "42")
    (parsed,) = template.parse(template.write(Message("assistant", "", (call(q="x"),)))).calls
    assert (parsed.name, parsed.arguments) == ("search", {"q": "x"})
    ids = template.write(Message("assistant", "42"))
    assert template.codec.decode(ids).startswith("Assistant: 42")
    assert template.parse(ids).message.text == "42"


def test_prompt_that_opens_the_turn_leaves_no_prefix() -> None:
    assert load_template("chatml", ByteTokenizer()).reply_prefix == ""
