"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, later `[TOOL_CALLS]NAME[CALL_ID]id[ARGS]{…}`.

No mark closes a call: it runs to the next `[TOOL_CALLS]` or the end of the turn.
"""

from __future__ import annotations

import re

from agentfly.templates.readers.calls import JsonCall, named_call, read_name
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

_EXAMPLE = '[TOOL_CALLS][{"name": "…", "arguments": {…}}] or [TOOL_CALLS]NAME[ARGS]{…}'
_HEAD = re.compile(r'([^\[\]{}"]*)(?:\[CALL_ID\]([^\[\]{}"]*))?\[ARGS\]')
_JSON = JsonCall(id="id")


def _read(body: str) -> list[ToolCall]:
    if head := _HEAD.match(body):
        return [named_call(head[1], body[head.end() :], (head[2] or "").strip())]
    if body.lstrip()[:1] in ("[", "{"):
        return _JSON.read_list(body)
    name, _ = read_name(body.partition("{")[0])
    return [ToolCall(name, problem="it has no [ARGS]")]


read = Turn(
    Block(r"\[TOOL_CALLS\]", "", _read, _EXAMPLE),
    thinking=("[THINK]", "[/THINK]"),
    stray=r"\[ARGS\]|\[CALL_ID\]",
    hint="[",
)
