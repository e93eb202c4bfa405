"""Malformed turns: what could be parsed is returned, with errors that the model can act on."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly.templates.parsers.registry import PARSERS

CITY = {"city": "Paris"}
DEEP = "[" * 101 + "]" * 101

BROKEN_CALLS: list[tuple[str, str, str, dict[str, Any], str]] = [
    # parser, text, the name and arguments that are read, what the problem says
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "f", {}, "its arguments are not JSON: "),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>', "f", {}, "at character 32, near '1}}'"),
    ("hermes", '<tool_call>{"name": "f", "arg', "f", {}, "it is not closed with </tool_call>"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}',
        "f",
        CITY,
        "it is not closed with </tool_call>",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}}</tool_call>',
        "f",
        CITY,
        "more after its JSON: '}'",
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>',
        "",
        CITY,
        'it has no "name" (it has "arguments")',
    ),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', "", {}, 'it has no "name"'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "", {}, 'its "name" is a number, not a string'),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        "f",
        {},
        "its arguments are a string, not a JSON object",
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "f", {}, "its arguments are null"),
    (
        "hermes",
        '<tool_call>{"name": "f", "parameters": {}}</tool_call>',
        "f",
        {},
        'it has no "arguments" (it has "name", "parameters")',
    ),
    ("hermes", '<tool_call>[{"name": "f"}]</tool_call>', "", {}, 'it is a list, not an object with "name"'),
    ("hermes", '<tool_call>{"name": "f', "", {}, "it is not JSON: Unterminated string starting at character 9, near"),
    ("hermes", "<tool_call>f(1)</tool_call>", "", {}, "it is not JSON: Expecting value at character 0, near 'f(1)'"),
    ("hermes", "<tool_call></tool_call>", "", {}, "it is not JSON: Expecting value at character 0, at the end"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "f", {}, "JSON has no NaN"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -Infinity}}</tool_call>', "f", {}, "JSON has no -Infinity"),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        "f",
        {},
        "the number 1e999 is too large",
    ),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "f", {}, "digits"),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {{"a": {DEEP}}}}}</tool_call>',
        "f",
        {},
        "nested more than 100 deep",
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "f", "arguments": {"[" * 90_000}</tool_call>',
        "f",
        {},
        "nested more than 100 deep",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        "f",
        {},
        "half of a surrogate pair",
    ),
    ("qwen-xml", "<tool_call>{}</tool_call>", "", {}, "it does not begin with <function=NAME>"),
    ("qwen-xml", "<tool_call><function=></function></tool_call>", "", {}, "it has no name"),
    (
        "qwen-xml",
        "<tool_call><function=a b></function></tool_call>",
        "",
        {},
        "it has no readable name (found 'a b')",
    ),
    ("qwen-xml", "<function=f><parameter=city>Paris</parameter>", "f", CITY, "it is not closed with </function>"),
    ("qwen-xml", "<function=f", "f", {}, "it is not closed with </function>"),
    (
        "qwen-xml",
        "<tool_call><function=f><parameter=city>Paris</parameter><parameter=b>x</function></tool_call>",
        "f",
        CITY,
        "its argument b is not closed with </parameter>",
    ),
    (
        "qwen-xml",
        "<tool_call><function=f><parameter=city>Paris</parameter></tool_call>",
        "f",
        CITY,
        "its function is not closed with </function>",
    ),
    (
        "qwen-xml",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "f",
        {"a": "2"},
        "its argument a is given twice",
    ),
    ("qwen-xml", "<function=f>x</function>", "f", {}, "text that belongs to no argument: 'x'"),
    ("qwen-xml", "<tool_call><function=f></function>x</tool_call>", "f", {}, "there is more after </function>: 'x'"),
    ("llama-json", '{"name": "f", "parameters": {"a": 1}', "f", {}, "its arguments are not JSON"),
    (
        "llama-json",
        '{"name": "f", "parameters": {"city": "Paris"}} thanks',
        "f",
        CITY,
        "more after its JSON: ' thanks'",
    ),
    ("llama-json", '```json\n{"name": "f", "parameters": {"city": "Paris"}}\n```', "f", CITY, "more after its JSON"),
    ("llama-json", '{"name": 3, "parameters": {"city": "Paris"}}', "", CITY, 'its "name" is a number'),
    ("llama-json", '<|python_tag|>brave_search.call(query="x")', "", {}, "it is not JSON"),
    ("llama-json", "<|python_tag|>", "", {}, "it is not JSON"),
    ("llama-pythonic", "[f(1)]", "f", {}, "its arguments must be named"),
    ("llama-pythonic", "[f(**x)]", "f", {}, "its arguments must be named"),
    ("llama-pythonic", "[f(a=1", "f", {}, "it is not Python: "),
    ("llama-pythonic", "[f(a=b)]", "f", {}, "its argument a is the name b"),
    ("llama-pythonic", "[f(a=true)]", "f", {}, "write text in quotes, and True, False or None"),
    ("llama-pythonic", "[f(a=1+1)]", "f", {}, "no literal that JSON has too"),
    ("llama-pythonic", "[f(a=b'x')]", "f", {}, "no literal that JSON has too"),
    ("llama-pythonic", "[f(a=1e999)]", "f", {}, "no literal that JSON has too"),
    ("llama-pythonic", "[f(a=-1e999)]", "f", {}, "no literal that JSON has too"),
    ("llama-pythonic", "[f(a={1: 2})]", "f", {}, "a key that is not a string"),
    ("llama-pythonic", "[f(a={**b})]", "f", {}, "a key that is not a string"),
    ("llama-pythonic", "[f(a=1, a=2)]", "f", {"a": 1}, "its argument a is given twice"),
    ("llama-pythonic", "[f(a='\\ud800')]", "f", {}, "half of a surrogate pair"),
    ("llama-pythonic", f"[f(a=0x{'f' * 9000})]", "f", {}, "digits"),
    ("llama-pythonic", "[f()()]", "", {}, "it has no readable name"),
    ("llama-pythonic", "[f() for x in y]", "", {}, "it is not a function call"),
    ("llama-pythonic", "[f(a=1)]\nThat is it.", "f", {}, "it is not Python"),
    ("llama-pythonic", "<|python_tag|>x = 1", "", {}, "it is not a function call"),
    ("llama-pythonic", "<|python_tag|>", "", {}, "it holds no call"),
    ("llama-pythonic", "<|python_start|>[f(a=1)]", "f", {"a": 1}, "it is not closed with <|python_end|>"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}', "f", {}, "its arguments are not JSON"),
    ("mistral", "[TOOL_CALLS][]", "", {}, "its list holds no call"),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"city": "Paris"}}', "f", CITY, "it is not in a list"),
    ("mistral", '[TOOL_CALLS]f{"city": "Paris"}', "f", {}, "it has no [ARGS]"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"city": "Paris"', "f", {}, "its arguments are not JSON"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]", "f", {}, "its arguments are a list, not a JSON object"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"city": "Paris"} ok', "f", CITY, "there is more after its arguments: 'ok'"),
    ("mistral", '[TOOL_CALLS][ARGS]{"city": "Paris"}', "", CITY, "it has no name"),
    ("deepseek", '<｜tool▁call▁begin｜>f{"city": "Paris"}<｜tool▁call▁end｜>', "", {}, "it has no <｜tool▁sep｜>"),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Paris"}',
        "f",
        CITY,
        "it is not closed with <｜tool▁call▁end｜>",
    ),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>",
        "f",
        {},
        "its arguments are not JSON",
    ),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>',
        "",
        CITY,
        "it has no name",
    ),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"city": "Paris"}\n``` ok<｜tool▁call▁end｜>',
        "f",
        CITY,
        "there is more after its arguments",
    ),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>tool<｜tool▁sep｜>f\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>',
        "f",
        CITY,
        "stands 'tool', not 'function'",
    ),
    ("glm", "<tool_call>\n</tool_call>", "", {}, "it has no name"),
    ("glm", '<tool_call>{"name": "f"}</tool_call>', "", {}, "it has no readable name"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>", "f", {}, "its argument a is not closed"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "f", {}, "text that belongs to no argument"),
    ("glm", "<tool_call>f\n", "f", {}, "it is not closed with </tool_call>"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{", "f", {}, "its arguments are not JSON"),
    ("harmony", "<|channel|>commentary to=functions.<|message|>{}", "", {}, "it has no name"),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>[]", "f", {}, "its arguments are a list"),
    (
        "command-r",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"city": "Paris"}}]',
        "f",
        CITY,
        "not closed with <|END_ACTION|>",
    ),
    (
        "command-r",
        'Action: ```json\n[{"tool_name": "f", "parameters": {"city": "Paris"}}]',
        "f",
        CITY,
        "it is not closed with ```",
    ),
    (
        "command-r",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": }]<|END_ACTION|>',
        "f",
        {},
        "its arguments are not JSON",
    ),
    ("command-r", '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>', "", {}, 'it has no "tool_name"'),
    ("gemma", "```tool_code\nprint(f(a=1))\n```", "print", {}, "its arguments must be named"),
    ("gemma", "```tool_code\nf(a=1\n```", "f", {}, "it is not Python"),
    ("gemma", "```tool_code\nf(a=1)", "f", {"a": 1}, "it is not closed with ```"),
    ("gemma", '```json\n{"name": "f", "parameters": {"a": }}\n```', "f", {}, "its arguments are not JSON"),
    ("gemma-4", '<|tool_call>call:f{city:<|"|>Paris<|"|>}', "f", CITY, "it is not closed with <tool_call|>"),
    ("gemma-4", "<|tool_call>call:f{city:Paris}<tool_call|>", "f", {}, "the value 'Paris' is neither JSON nor text"),
    ("gemma-4", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "f", {}, '<|"|> is missing after'),
    ("gemma-4", "<|tool_call>call:f{a:1 b:2}<tool_call|>", "f", {}, "the value '1 b:2' is neither"),
    ("gemma-4", "<|tool_call>call:f{a:1<tool_call|>", "f", {}, "',' or '}' is missing"),
    ("gemma-4", "<|tool_call>call:f{a:1,a:2}<tool_call|>", "f", {}, "its argument a is given twice"),
    ("gemma-4", "<|tool_call>call:f{}x<tool_call|>", "f", {}, "there is more after its arguments: 'x'"),
    ("gemma-4", "<|tool_call>f{}<tool_call|>", "f", {}, "it does not begin with call:NAME"),
    ("gemma-4", "<|tool_call>call:{}<tool_call|>", "", {}, "it has no name"),
    ("gemma-4", f"<|tool_call>call:f{{a:{DEEP}}}<tool_call|>", "f", {}, "nested more than 100 deep"),
    (
        "deepseek-dsml",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">x</｜DSML｜parameter></｜DSML｜invoke>',
        "f",
        {"a": "x"},
        "its argument a is not JSON",
    ),
    (
        "deepseek-dsml",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="city">Paris</｜DSML｜parameter></｜DSML｜invoke>',
        "f",
        {},
        "text that belongs to no argument",
    ),
    (
        "minimax-m2",
        '<minimax:tool_call><invoke name="f"><parameter name="city">Paris</parameter>',
        "f",
        CITY,
        "it is not closed with </invoke>",
    ),
    ("minimax-m2", '<invoke name="f<parameter></invoke>', "", {}, "its name is not closed"),
    (
        "minimax-m3",
        ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>x]<]minimax[>[</b>]<]minimax[>[</invoke>',
        "f",
        {},
        "</b>",
    ),
    ("minimax-m3", ']<]minimax[>[<invoke name="f">x]<]minimax[>[</invoke>', "f", {}, "belongs to no argument: 'x'"),
    (
        "kimi-k2",
        "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>",
        "",
        {},
        "it has no <|tool_call_argument_begin|>",
    ),
    (
        "kimi-k2",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>",
        "f",
        {},
        "its arguments are not JSON",
    ),
    ("kimi-k3", '<|open|>call tool="f"<|close|>call<|sep|>', "", {}, "its tag is not <|open|>call tool="),
    ("lfm2", "<|tool_call_start|>[f(a=x)]<|tool_call_end|>", "f", {}, "its argument a is the name x"),
    ("lfm2", "<|tool_call_start|>[f(city='Paris')]", "f", CITY, "it is not closed with <|tool_call_end|>"),
    (
        "nemotron-v2",
        '<TOOLCALL>[{"name": "f", "arguments": {"city": "Paris"}}]',
        "f",
        CITY,
        "not closed with </TOOLCALL>",
    ),
    ("apriel", "<tool_calls>[]</tool_calls>", "", {}, "its list holds no call"),
    ("apriel", '<tool_calls>{"name": "f", "arguments": {}</tool_calls>', "f", {}, "its arguments are not JSON"),
    ("apertus", '<|tools_prefix|>[{"f": 1}]', "f", {}, "its arguments are a number"),
    ("apertus", '<|tools_prefix|>[{"f": {}, "g": {}}]', "", {}, "the name of the function as its only key"),
    ("apertus", '<|tools_prefix|>{"f": {}}', "", {}, "it is an object, not a list of calls"),
    ("apertus", '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>x', "f", {}, "there is more after its list: 'x'"),
    ("gigachat", '<|function_call|>{"name": "f", "arguments": {"city": "Paris"}} x', "f", CITY, "more after its JSON"),
    ("minicpm", '<function name="f"><param name="city">Paris</param>', "f", CITY, "not closed with </function>"),
    (
        "muse",
        ' to=f<|message|><atem:invoke name="f"><atem:parameter name="city">Paris</atem:invoke>',
        "f",
        {},
        "its argument city is not closed",
    ),
    ("functionary-v3.1", "<function=f>{</function>", "f", {}, "its arguments are not JSON"),
    ("functionary-v3.2", 'f\n{"city": "Paris"} x', "f", CITY, "there is more after its arguments"),
]


@pytest.mark.parametrize(
    ("parser", "text", "name", "arguments", "problem"), BROKEN_CALLS, ids=lambda value: str(value)[:40] or "-"
)
def test_malformed_call_is_described(
    parser: str, text: str, name: str, arguments: dict[str, Any], problem: str
) -> None:
    reply = PARSERS[parser](text)
    (call,) = reply.calls
    assert (call.name, call.arguments) == (name, arguments)
    assert problem in call.problem
    assert "; write " in call.problem, "the problem shows the right form"
    assert call.raw in text
    assert reply.problems == ()


BROKEN_TURNS = [
    # parser, text, content, thinking, what the problem says
    ("hermes", "<think>Hm", "", "Hm", "the thinking is not closed; write </think>"),
    (
        "hermes",
        'Well.<think>Hm<tool_call>{"name": "f"}</tool_call>',
        "Well.",
        'Hm<tool_call>{"name": "f"}</tool_call>',
        "not closed",
    ),
    ("hermes", "Hm</think>6", "Hm</think>6", "", "</think> stands alone; write <think>…</think>"),
    (
        "hermes",
        '{"name": "f"}</tool_call>',
        '{"name": "f"}</tool_call>',
        "",
        "</tool_call> stands alone; write <tool_call>",
    ),
    ("qwen-xml", "a</function>", "a</function>", "", "</function> stands alone"),
    ("mistral", "[THINK]Hm", "", "Hm", "write [/THINK] before"),
    ("mistral", "f[ARGS]{}", "f[ARGS]{}", "", "[ARGS] stands alone"),
    ("deepseek", "<｜tool▁calls▁begin｜>f", "<｜tool▁calls▁begin｜>f", "", "<｜tool▁calls▁begin｜> stands alone"),
    ("command-r", "<|START_THINKING|>Hm", "", "Hm", "write <|END_THINKING|>"),
    ("llama-pythonic", "a<|python_end|>", "a<|python_end|>", "", "<|python_end|> stands alone"),
    ("kimi-k2", "<|tool_calls_section_begin|>f", "<|tool_calls_section_begin|>f", "", "_begin|> stands alone"),
    ("minimax-m2", "<minimax:tool_call>f", "<minimax:tool_call>f", "", "<minimax:tool_call> stands alone"),
    ("muse", " to=f<|message|>6", " to=f\n6", "", "the message to=f holds no call"),
    ("muse", "to me<|message|>6", "to me<|message|>6", "", "the header 'to me' is not one of"),
    ("harmony", "<|message|>6", "6", "", "names none of the channels analysis, commentary, final"),
    ("harmony", "<|channel|>loud<|message|>6", "<|channel|>loud\n6", "", "'<|channel|>loud' names none"),
    ("harmony", "<|start|>user<|message|>6", "<|start|>user\n6", "", "names none of the channels"),
    ("harmony", "<|channel|>analysis", "<|channel|>analysis", "", "is not followed by <|message|>"),
    ("harmony", "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>6", "6", "Hm", "a message is not closed"),
]


@pytest.mark.parametrize(("parser", "text", "content", "thinking", "problem"), BROKEN_TURNS)
def test_a_problem_outside_every_call_belongs_to_the_reply(
    parser: str, text: str, content: str, thinking: str, problem: str
) -> None:
    reply = PARSERS[parser](text)
    assert (reply.message.content, reply.message.thinking, reply.calls) == (content, thinking, ())
    (reported,) = reply.problems
    assert problem in reported


OPENINGS = {
    "mistral": "[THINK]",
    "command-r": "<|START_THINKING|>",
    "gemma-4": "<|channel>thought",
    "kimi-k3": "<|open|>think<|sep|>",
    "minimax-m3": "<mm:think>",
}


@pytest.mark.parametrize("parser", [name for name in PARSERS if name != "harmony"])
def test_unclosed_thinking_is_all_thinking(parser: str) -> None:
    text = 'Hm. <tool_call>{"name": "f"}</tool_call> [f()]'
    reply = PARSERS[parser](OPENINGS.get(parser, "<think>") + text)
    assert (reply.message.content, reply.message.thinking, reply.calls) == ("", text, ())
    assert "the thinking is not closed" in reply.problems[0]


def test_valid_call_next_to_a_malformed_one_is_kept() -> None:
    reply = PARSERS["hermes"]('<tool_call>{"name": "f"<tool_call>{"name": "g", "arguments": {}}</tool_call>')
    assert [(call.name, bool(call.problem)) for call in reply.calls] == [("f", True), ("g", False)]


def test_text_is_never_executed(tmp_path: Any) -> None:
    trace = tmp_path / "trace"
    PARSERS["llama-pythonic"](f"[f(a=open({str(trace)!r}, 'w'))]")
    assert not trace.exists()
