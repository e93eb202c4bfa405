"""Kimi K2 and K3.

    K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>, in a section of calls
    K3: <|open|>call tool="NAME" index="1"<|sep|>, an <|open|>argument key="KEY" type="string"<|sep|> for each argument

In K2 `functions.NAME:0` is also the id of the call. K3 writes strings as they are and other values as JSON.
"""

from __future__ import annotations

import html
import re

from agentfly.templates.readers.calls import named_call, read_name
from agentfly.templates.readers.invoke import read_typed_call
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

_ARGUMENTS = "<|tool_call_argument_begin|>"
_END = "<|tool_call_end|>"
_SECTION = r"<\|tool_calls?_section_begin\|>"
_K2_EXAMPLE = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0{_ARGUMENTS}{{…}}{_END}"
_K3_EXAMPLE = (
    '<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY" type="string"<|sep|>value'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
_K3_HEAD = re.compile(r'([^"<]*)"(?: index="\d*")?<\|sep\|>')
_K3_ARGUMENT = re.compile(r'\s*+<\|open\|>argument key="([^"<]*)" type="(\w*)"<\|sep\|>')


def _read_k2(body: str) -> list[ToolCall]:
    head, mark, arguments = body.partition(_ARGUMENTS)
    call_id = head.strip()
    name, colon, number = call_id.removeprefix("functions.").rpartition(":")
    if not colon or not number.isdigit():
        name = call_id.removeprefix("functions.")
    if not mark:
        return [ToolCall(read_name(name)[0], problem=f"it has no {_ARGUMENTS}")]
    return [named_call(name, arguments, call_id)]


def _read_k3(body: str) -> list[ToolCall]:
    head = _K3_HEAD.match(body)
    if head is None:
        return [ToolCall("", problem='its tag is not <|open|>call tool="NAME" index="1"<|sep|>')]
    inside = body[head.end() :]
    return [read_typed_call(html.unescape(head[1]), inside, _K3_ARGUMENT, "<|close|>argument<|sep|>", text="string")]


read_k2 = Turn(
    Block(rf"(?:{_SECTION}\s*+)?<\|tool_call_begin\|>", _END, _read_k2, _K2_EXAMPLE),
    stray="|".join([re.escape(_END), re.escape(_ARGUMENTS), _SECTION]),
    frame=r"<\|tool_calls?_section_end\|>",
)
read_k3 = Turn(
    Block(r'<\|open\|>call tool="', "<|close|>call<|sep|>", _read_k3, _K3_EXAMPLE),
    thinking=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    stray=r"<\|close\|>(?:call|argument)<\|sep\|>",
    frame=r"<\|(?:open|close)\|>(?:response|tools|message)<\|sep\|>",
)
