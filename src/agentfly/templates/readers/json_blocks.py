"""Calls as JSON between a start marker and an end marker: Apriel, MiniMax M1, Nemotron Nano v2, Apertus, GigaChat 3.1.

The JSON is a list of call objects, or call objects one after another. Apertus writes `{NAME: arguments}`, and ends its
turn with the end marker. GigaChat has no end marker, and one call a turn.
"""

from __future__ import annotations

import re

from agentfly.templates.readers.calls import JsonCall, kind_of, read_json, with_problem
from agentfly.templates.readers.turn import Block, ReadBlock, Turn
from agentfly.types import ToolCall

_JSON = JsonCall()
_OBJECT = '{"name": "…", "arguments": {…}}'
_APERTUS_END = "<|tools_suffix|>"


def _read_list(body: str) -> list[ToolCall]:
    if not body.lstrip().startswith("{"):
        return _JSON.read_list(body)
    calls: list[ToolCall] = []
    at, end = 0, len(body.rstrip())
    while at < end:
        value, at, wrong = read_json(body, at)
        if wrong:
            return [*calls, _JSON.broken(body[at:], wrong)]
        calls.append(_JSON.call(value))
    return calls


def _read_apertus(body: str) -> list[ToolCall]:
    body, _, after = body.partition(_APERTUS_END)
    value, end, wrong = read_json(body)
    if wrong:
        return [ToolCall("", problem=f"it is not JSON: {wrong}")]
    if not isinstance(value, list) or not value:
        return [ToolCall("", problem=f"it is {kind_of(value)}, not a list of calls")]
    calls = [_apertus_call(each) for each in value]
    if rest := (body[end:] + after).strip():
        calls[-1] = with_problem(calls[-1], f"there is more after its list: {rest[:40]!r}")
    return calls


def _apertus_call(value: object) -> ToolCall:
    if not isinstance(value, dict) or len(value) != 1:
        return ToolCall("", problem="it is not an object with the name of the function as its only key")
    ((name, arguments),) = value.items()
    if not name or not isinstance(arguments, dict):
        return ToolCall(name, problem=f"its arguments are {kind_of(arguments)}, not a JSON object")
    return ToolCall(name, arguments)


def _reader(opening: str, closing: str, read: ReadBlock, example: str) -> Turn:
    block = Block(re.escape(opening), closing, read, f"{opening}{example}{closing}")
    return Turn(block, stray=re.escape(closing))


read_apriel = _reader("<tool_calls>", "</tool_calls>", _read_list, f"[{_OBJECT}]")
read_nemotron = _reader("<TOOLCALL>", "</TOOLCALL>", _read_list, f"[{_OBJECT}]")
read_gigachat = _reader("<|function_call|>", "", _JSON.read, _OBJECT)
read_apertus = _reader("<|tools_prefix|>", "", _read_apertus, f'[{{"NAME": {{…}}}}]{_APERTUS_END}')
