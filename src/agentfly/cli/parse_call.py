"""Parser of calls as a user types them: `press(times=3)`, `press {"times": 3}`, `press 3`, or `run_shell ls -l`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentfly.templates.parsers.pythonic import parse_python_calls
from agentfly.tooling import Tool, Toolbox
from agentfly.types import ToolCall

_NAME = re.compile(r"\s*([\w.:/-]*)")


def parse_call(line: str, toolbox: Toolbox, block: str | None = None) -> ToolCall:
    """Parse a line as a call; a malformed call has its `problem` set. `block`: text of the next argument."""
    match = _NAME.match(line)
    assert match is not None
    name = match[1]
    rest = line[match.end() :]
    tool = toolbox.find(ToolCall(name))
    if not isinstance(tool, Tool):
        return ToolCall(name)
    if block is None and rest.startswith("("):
        calls = parse_python_calls(line)
        return calls[0] if len(calls) == 1 else ToolCall(name, problem="write one call per line")
    parameters: Mapping[str, Any] = tool.arguments.schema["properties"]
    rest = rest.strip()
    if block is None and rest.startswith("{"):
        call = ToolCall.of({"name": name, "arguments": rest})
        if not _is_single_text(parameters) or (call.arguments and set(call.arguments) <= set(parameters)):
            return call
    return ToolCall(name, _positional_arguments(parameters, rest, block))


def _positional_arguments(parameters: Mapping[str, Any], rest: str, block: str | None) -> dict[str, Any]:
    """Words as positional arguments; the last parameter takes the rest of the line, the block is one more argument."""
    names = list(parameters) or ["arguments"]  # unknown: the tool answers that it takes none
    words = rest.split(maxsplit=max(len(names) - 1 - (block is not None), 0)) if rest else []
    values = [*words, block] if block is not None else words
    if block is not None and len(names) == 1:
        values = [f"{rest}\n{block}" if rest else block]
    named = zip(names, values, strict=False)
    return {name: _value(parameters.get(name, {}), text) for name, text in named if text is not None}


def _value(spec: Mapping[str, Any], text: str) -> Any:
    if _is_text(spec):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_text(spec: Mapping[str, Any]) -> bool:
    return any(each.get("type") == "string" for each in (spec, *spec.get("anyOf", ())))


def _is_single_text(parameters: Mapping[str, Any]) -> bool:
    return len(parameters) == 1 and _is_text(next(iter(parameters.values())))
