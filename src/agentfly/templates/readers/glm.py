"""GLM 4.5: `<tool_call>NAME`, an `<arg_key>` and an `<arg_value>` for every argument, `</tool_call>`."""

from __future__ import annotations

import re

from agentfly.templates.readers.calls import tagged_call
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

_EXAMPLE = "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"
_ARGUMENT = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>")


def _read(body: str) -> list[ToolCall]:
    name, mark, rest = body.partition("<arg_key>")
    return [tagged_call(name, mark + rest, _ARGUMENT, "</arg_value>")]


read = Turn(Block("<tool_call>", "</tool_call>", _read, _EXAMPLE), stray="</tool_call>")
