"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several."""

from __future__ import annotations

from agentfly.templates.readers.calls import JsonCall
from agentfly.templates.readers.turn import Block, Turn

_EXAMPLE = '<tool_call>{"name": "…", "arguments": {…}}</tool_call>'

read = Turn(Block("<tool_call>", "</tool_call>", JsonCall().read, _EXAMPLE), stray="</tool_call>")
