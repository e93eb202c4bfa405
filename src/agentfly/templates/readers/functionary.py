"""Functionary: v3.1 writes `<function=NAME>{…}</function>`; v3.2 `NAME\\n{…}`, several with `>>>` between them.

In v3.2 the text for the user stands under the name `all`. The prompt ends with the first `>>>`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agentfly.templates.readers.calls import named_call, with_problem
from agentfly.templates.readers.plain import read as read_plain
from agentfly.templates.readers.turn import Block, Turn, joined
from agentfly.types import Message, Reply, ToolCall

_V32_EXAMPLE = "NAME, a line break, and the arguments as a JSON object"
_RECIPIENT = re.compile(r"(?:\A(?:>>>)?|>>>)([\w.-]{1,128}+)\n")


def _read_v31(body: str) -> list[ToolCall]:
    name, _, arguments = body.partition(">")
    return [named_call(name, arguments)]


def read_v32(text: str) -> Reply:
    """Read the parts of one turn, each with its recipient."""
    parts = list(_RECIPIENT.finditer(text))
    if not parts or parts[0].start() > 0:
        return read_plain(text)
    content: list[str] = []
    calls: list[ToolCall] = []
    ends = [part.start() for part in parts[1:]] + [len(text)]
    for part, end in zip(parts, ends, strict=True):
        body = text[part.end() : end]
        if part[1] == "all":
            content.append(body)
        else:
            call = named_call(part[1], body)
            wrong = replace(with_problem(call, f"write {_V32_EXAMPLE}"), raw=body)
            calls.append(wrong if call.problem else call)
    return Reply(Message("assistant", joined(content), tuple(calls)))


read_v31 = Turn(
    Block("<function=", "</function>", _read_v31, "<function=NAME>{…}</function>"),
    stray="</function>",
)
