"""On any text, a parser returns quickly, never raises, and loses no text."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.templates.parsers.registry import PARSERS
from agentfly.types import Reply
from tests.scaling import FLOOR, grows_at_most
from tests.templates.parsers.turns import GOOD_TURNS, NAMES

pytestmark = pytest.mark.filterwarnings("error")

WORD = "ferret"
"""Stands in no turn; wherever it is put in, it has to come out."""

MARKS = [
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "[THINK]",
        "[/THINK]",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(
        "<|start|>assistant",
        "<|channel|>",
        "<|channel|>final",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|constrain|>json",
    ),
    *(
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_RESPONSE|>",
        "Action: ```json",
    ),
    *("<|tool_call>call:f{", "<tool_call|>", '<|"|>', "<|channel>thought", "<channel|>", '<｜DSML｜invoke name="'),
    *(
        '<｜DSML｜parameter name="a" string="false">',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        "<｜DSML｜tool_calls>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *('<|open|>call tool="f"<|sep|>', '<|open|>argument key="a" type="string"<|sep|>', "<|close|>argument<|sep|>"),
    *("<|close|>call<|sep|>", "<|open|>think<|sep|>", "<minimax:tool_call>", '<invoke name="f">', "</invoke>"),
    *(
        '<parameter name="a">',
        "]<]minimax[>[",
        ']<]minimax[>[<invoke name="f">',
        "]<]minimax[>[<a>",
        "]<]minimax[>[</a>",
    ),
    *("<|tool_call_start|>[", "<|tool_call_end|>", "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>"),
    *(
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        "<|function_call|>",
        '<function name="f">',
        '<param name="a">',
        "</param>",
    ),
    *("<![CDATA[", "]]>", "<|eom|>", " to=self", " to=f<|message|>", '<atem:invoke name="f">', "</atem:invoke>"),
    *(">>>", ">>>f\n", ">>>all\n", "<mm:think>", "</mm:think>"),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", "```tool_code\n", "```json\n", "```", "to=functions.f "),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {}}',
        "[f(a=1)]",
        "\n[f(",
        '\n{"name":',
        "NaN",
        "1e999",
    ),
    *(
        '"',
        "'",
        "\\",
        "\\u",
        "\\ud800",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        ";",
        "=",
        "\n",
        "\t",
        " ",
        "\0",
        "\r\n",
        "'''",
    ),
    *("é", "😀", "\u2028", "\ud800", "\ufeff", "ﷺ", "e\u0301", "\x1b[0m", "0" * 5000, "[" * 300, "-" * 300),
]


def check(reply: Reply) -> None:
    """What holds for every reply."""
    assert type(reply.message.content) is str
    assert type(reply.message.thinking) is str
    assert reply.answer is None
    assert all(type(problem) is str and problem for problem in reply.problems)
    for call in reply.calls:
        assert type(call.name) is str
        assert type(call.arguments) is dict
        assert call.name or call.problem
        assert not call.raw or call.problem
        json.dumps(dict(call.arguments), allow_nan=False)


def words_of(reply: Reply) -> str:
    """Everything a reply holds of the turn's text."""
    calls = [(call.name, call.id, json.dumps(dict(call.arguments)), call.raw) for call in reply.calls]
    return f"{reply.message.content}{reply.message.thinking}{calls}"


def mutate(text: str, draw: random.Random) -> str:
    """Cut, double, splice, or break into a turn, once to four times."""
    for _ in range(draw.randint(1, 4)):
        start, end = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        match draw.randrange(7):
            case 0:
                text = text[:start]
            case 1:
                text = text[:start] + text[end:]
            case 2:
                text = text[:end] + text[start:]
            case 3:
                text = text[:start] + draw.choice(GOOD_TURNS).text[draw.randint(0, 20) :] + text[start:]
            case 4:
                text = text[:start] + draw.choice(MARKS) + text[start:]
            case 5:
                text = text[:start] + draw.choice(MARKS) + text[start + 1 :]
            case 6:
                text = text[:start] + chr(draw.choice((draw.randrange(128), draw.randrange(0x110000)))) + text[start:]
    return text


@pytest.mark.parametrize("shard", range(4))
def test_a_hundred_thousand_mutated_turns(shard: int) -> None:
    draw = random.Random(shard)
    for _ in range(25_000):
        turn = draw.choice(GOOD_TURNS)
        name = turn.parser if draw.random() < 0.8 else draw.choice(NAMES)
        check(PARSERS[name](mutate(turn.text, draw)))


@pytest.mark.parametrize("name", NAMES)
def test_inserted_word_is_in_the_output(name: str) -> None:
    draw = random.Random(name)
    turns = [turn.text for turn in GOOD_TURNS if turn.parser == name]
    for _ in range(1_000):
        text = mutate(draw.choice(turns), draw)
        at = draw.randint(0, len(text))
        reply = PARSERS[name](f"{text[:at]} {WORD} {text[at:]}")
        # The one place where a word may go: a key that means nothing, in an object that reads well.
        in_object = "{" in text[:at] and "}" in text[at:] and any(not call.problem for call in reply.calls)
        assert WORD in words_of(reply) or in_object, (text, at)


ANY_TEXT = st.one_of(
    st.text(),
    st.lists(st.one_of(st.sampled_from(MARKS), st.text(max_size=8)), max_size=20).map("".join),
    st.tuples(st.sampled_from([turn.text for turn in GOOD_TURNS]), st.text()).map("".join),
)


@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
def test_any_text_is_answered(text: str) -> None:
    for parser in PARSERS.values():
        check(parser(text))


@settings(max_examples=50, deadline=None)
@given(
    arguments=st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
)
def test_arguments_come_back_as_they_were_written(arguments: dict[str, object]) -> None:
    """Also when their strings hold the very marks of the format."""
    for escaped in (True, False):
        written = json.dumps({"name": "f", "arguments": arguments | {"mark": "</tool_call>"}}, ensure_ascii=escaped)
        (call,) = PARSERS["hermes"](f"<tool_call>{written}</tool_call>").calls
        assert (call.arguments, call.problem) == (arguments | {"mark": "</tool_call>"}, "")


LONG = 25_000
OPENINGS = {
    "hermes": '<tool_call>{"name": "f", "arguments": ',
    "qwen-xml": "<tool_call><function=f>",
    "llama-json": '{"name": "f", "parameters": ',
    "llama-pythonic": "[f(a=",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>",
    "glm": "<tool_call>f",
    "harmony": "<|channel|>analysis to=f<|message|>",
    "command-r": "<|START_ACTION|>",
    "gemma": "```tool_code\nf(a=",
    "gemma-4": "<|tool_call>call:f{a:",
    "deepseek-dsml": '<｜DSML｜invoke name="f">',
    "kimi-k2": "<|tool_call_begin|>f<|tool_call_argument_begin|>",
    "kimi-k3": '<|open|>call tool="f" index="1"<|sep|>',
    "minimax-m2": '<invoke name="f">',
    "minimax-m3": ']<]minimax[>[<invoke name="f">',
    "lfm2": "<|tool_call_start|>[f(a=",
    "nemotron-v2": "<TOOLCALL>[",
    "apertus": "<|tools_prefix|>[",
    "apriel": "<tool_calls>",
    "gigachat": "<|function_call|>",
    "minicpm": '<function name="f">',
    "muse": " to=f<|message|>",
    "functionary-v3.1": "<function=f>",
    "functionary-v3.2": "f\n",
}
UNITS = [
    *MARKS,
    *('<tool_call>{"', '<tool_call>{"\n', '<tool_call>{"\\"', "<tool_call><function=f><parameter=a>", "<function="),
    *(
        "<tool_call>f<arg_key>a</arg_key><arg_value>",
        '{"name":"f","parameters":\n',
        '\n{"name":"f","parameters":{"a":"',
    ),
    *("{};", "<|python_tag|>{};", "[f(\n", "\n[f()]", "x.", "f()", '[TOOL_CALLS][{"', "<｜tool▁calls▁begin｜>\n "),
    *(
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"\n',
        "<|channel|>analysis<|message|>",
        '{"a":',
        "1+",
        "not ",
        "lambda:",
        "\t\n ",
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_parsing_time_is_bounded(name: str) -> None:
    for opening in {"", OPENINGS.get(name, "")}:
        for unit in UNITS:

            def cpu_seconds(size: int, opening: str = opening, unit: str = unit) -> float:
                text = opening + unit * (size // len(unit))
                began = time.process_time()
                check(PARSERS[name](text))
                return time.process_time() - began

            bounded = cpu_seconds(LONG) <= FLOOR or grows_at_most(cpu_seconds, LONG // 2, LONG, ratio=3.0)
            assert bounded, (opening, unit)
