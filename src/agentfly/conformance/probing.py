"""Calls made up from the schemas of tools: those that fit, and those that no tool should be hurt by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from agentfly.tooling import Tool, Toolbox
from agentfly.types import Task, ToolCall

ROUNDS = 2
LARGE = "x" * 1_000_000
NOT_TEXT: tuple[Any, ...] = (7, None, ["x"], {"x": 1}, True)
ODD_TEXTS = ("", " ", "\0", "\ud800", "\x1b[2J'\";{}<>%s\\", LARGE)


def probes(toolbox: Toolbox, task: Task, random: Random) -> list[ToolCall]:
    """Calls of every tool that fit its schema; those that end the chain come last, and once."""
    words = re.findall(r"\w+", task.question)[:200] or ["something"]
    going_on = [tool for tool in toolbox if not tool.ends_chain]
    ending = [tool for tool in toolbox if tool.ends_chain]
    return [ToolCall(tool.name, fitting(tool, words, random)) for tool in (*going_on * ROUNDS, *ending)]


def fitting(tool: Tool, words: list[str], random: Random) -> dict[str, Any]:
    """Arguments that a tool takes."""
    parameters = tool.schema["function"]["parameters"]
    return {name: _value(parameters["properties"][name], words, random) for name in parameters.get("required", [])}


def _value(spec: Mapping[str, Any], words: list[str], random: Random) -> Any:
    for choices in ("enum", "anyOf", "oneOf"):
        if there := spec.get(choices):
            chosen = random.choice(there)
            return chosen if choices == "enum" else _value(chosen, words, random)
    if "const" in spec:
        return spec["const"]
    match spec.get("type"):
        case "integer":
            low = int(spec.get("minimum", 0))
            return random.randint(low, int(spec.get("maximum", low + 9)))
        case "number":
            return float(spec.get("minimum", 0)) + random.random()
        case "boolean":
            return random.random() < 0.5
        case "array":
            return [_value(spec.get("items", {}), words, random) for _ in range(spec.get("minItems", 1))]
        case "object":
            inside = spec.get("properties", {})
            return {name: _value(inside[name], words, random) for name in spec.get("required", [])}
        case "null":
            return None
        case _:
            return random.choice(words)


def hostile(toolbox: Toolbox, task: Task, random: Random) -> Iterator[ToolCall]:
    """Calls that a model in confusion makes: of no tool, without an argument, with one of another kind or size."""
    words = re.findall(r"\w+", task.question)[:200] or ["something"]
    yield ToolCall("no_such_tool", {"x": 1})
    yield ToolCall("", problem="it has no name")
    for tool in sorted(toolbox, key=lambda each: each.ends_chain):
        yield ToolCall(tool.name, {**fitting(tool, words, random), "no_such_argument": 1})
        for name, spec in tool.schema["function"]["parameters"]["properties"].items():
            good = fitting(tool, words, random)
            yield ToolCall(tool.name, {other: value for other, value in good.items() if other != name})
            for bad in (*NOT_TEXT, *ODD_TEXTS) if _takes_text(spec) else (*NOT_TEXT, LARGE, -(10**30), "7"):
                yield ToolCall(tool.name, {**good, name: bad})


def _takes_text(spec: Mapping[str, Any]) -> bool:
    inside = [*spec.get("anyOf", ()), *spec.get("oneOf", ())]
    return spec.get("type") == "string" or any(map(_takes_text, inside))
