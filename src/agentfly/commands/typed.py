"""A call as a person types it: `press(times=3)`, `press {"times": 3}`, `press 3`, or `run_shell ls -l`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentfly.templates.readers.llama_pythonic import read_python
from agentfly.tooling import Tool, Toolbox
from agentfly.types import ToolCall

_NAME = re.compile(r"\s*([\w.:/-]*)")


def read_call(line: str, toolbox: Toolbox, block: str | None = None) -> ToolCall:
    """The call that a line means; one that cannot be read says why. `block`: lines that are the next argument."""
    found = _NAME.match(line)
    assert found is not None
    name, rest = found[1], line[found.end() :]
    tool = toolbox.find(ToolCall(name))
    if not isinstance(tool, Tool):
        return ToolCall(name)
    if block is None and rest.startswith("("):
        calls = read_python(line)
        return calls[0] if len(calls) == 1 else ToolCall(name, problem="one line is one call")
    takes: Mapping[str, Any] = tool.arguments.schema["properties"]
    rest = rest.strip()
    if block is None and rest.startswith("{"):
        call = ToolCall.of({"name": name, "arguments": rest})
        if not _one_text(takes) or (call.arguments and set(call.arguments) <= set(takes)):
            return call
    return ToolCall(name, _in_order(takes, rest, block))


def _in_order(takes: Mapping[str, Any], rest: str, block: str | None) -> dict[str, Any]:
    """Words as arguments in their order; the last takes all that is left, and the block is one more."""
    names = list(takes) or ["arguments"]  # which none takes, as the answer will say
    words = rest.split(maxsplit=max(len(names) - 1 - (block is not None), 0)) if rest else []
    values = [*words, block] if block is not None else words
    if block is not None and len(names) == 1:
        values = [f"{rest}\n{block}" if rest else block]
    named = zip(names, values, strict=False)
    return {name: _value(takes.get(name, {}), text) for name, text in named if text is not None}


def _value(spec: Mapping[str, Any], text: str) -> Any:
    if _is_text(spec):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_text(spec: Mapping[str, Any]) -> bool:
    return any(each.get("type") == "string" for each in (spec, *spec.get("anyOf", ())))


def _one_text(takes: Mapping[str, Any]) -> bool:
    return len(takes) == 1 and _is_text(next(iter(takes.values())))
