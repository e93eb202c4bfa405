"""Qwen3-Coder: `<tool_call><function=NAME><parameter=P>value</parameter>…</function></tool_call>`.

The function block may also stand alone, as agents for software engineering write it. A line break on either
side of a value belongs to the tags.
"""

from __future__ import annotations

import re

from agentfly.templates.readers.calls import tagged_call, with_problem
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

_BARE = "<function=NAME><parameter=KEY>value</parameter></function>"
_FUNCTION = re.compile(r"\s*<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?")


def _read_wrapped(body: str) -> list[ToolCall]:
    found = _FUNCTION.match(body)
    if found is None:
        return [ToolCall("", problem="it does not begin with <function=NAME>")]
    inside, closing, rest = body[found.end() :].rpartition("</function>")
    if not closing:
        return [with_problem(_call(found[1], rest), "its function is not closed with </function>")]
    call = _call(found[1], inside)
    rest = rest.strip()
    return [with_problem(call, f"there is more after </function>: {rest[:40]!r}") if rest else call]


def _read_bare(body: str) -> list[ToolCall]:
    name, _, inside = body.partition(">")
    return [_call(name, inside)]


def _call(name: str, inside: str) -> ToolCall:
    # With the break before every closing tag gone, a value is what stands between the tags.
    return tagged_call(name, inside.replace("\n</parameter>", "</parameter>"), _PARAMETER, "</parameter>")


read = Turn(
    Block("<tool_call>", "</tool_call>", _read_wrapped, f"<tool_call>{_BARE}</tool_call>"),
    Block("<function=", "</function>", _read_bare, _BARE),
    stray="</tool_call>|</function>",
)
