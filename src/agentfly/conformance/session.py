"""Calls in one leased instance, as a chain makes them, and calls generated from tool schemas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from agentfly import threads
from agentfly.environment import Environment
from agentfly.resources import Leases
from agentfly.tooling import Context, Tool, Toolbox, ToolResult
from agentfly.trajectory import CallStatus
from agentfly.types import Content, Task, ToolCall

_DURATION = re.compile(r"\b\d+\.\d+ ?s\b")
"""A duration in a text, which differs between runs."""
LARGE = "x" * 1_000_000
NOT_TEXT: tuple[Any, ...] = (7, None, ["x"], {"x": 1}, True)
ODD_TEXTS = ("", " ", "\0", "\ud800", "\x1b[2J'\";{}<>%s\\", LARGE)


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """Answer to a call."""

    observation: Content
    status: CallStatus
    ends_chain: bool

    @property
    def brief(self) -> str:
        return repr(self.observation if len(self.observation) < 100 else f"{str(self.observation)[:100]}…")


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls, their answers, and the instance's final state."""

    calls: tuple[ToolCall, ...]
    answers: tuple[CallAnswer, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    """The public attributes that are plain data."""

    def difference(self, other: Trace) -> str:
        """Describe the first difference of another run of the same calls. Empty if there is none."""
        for number, (call, answer, other_answer) in enumerate(
            zip(self.calls, self.answers, other.answers, strict=False), 1
        ):
            if answer != other_answer:
                return f"call {number}, {format_call(call)}, returned {other_answer.brief} instead of {answer.brief}"
        for name in sorted({*self.state, *other.state}):
            expected, actual = self.state.get(name), other.state.get(name)
            if expected != actual:
                return f"the attribute {name} was {actual!r:.100} afterwards instead of {expected!r:.100}"
        return ""


class CheckSession:
    """A leased instance, reset for a task."""

    def __init__(self, toolbox: Toolbox, task: Task, leases: Leases, instance: Environment) -> None:
        self._toolbox = toolbox
        self._task = task
        self._leases = leases
        self._instance = instance
        self._turn = 0

    async def act(self, call: ToolCall) -> CallAnswer:
        """Make a call, after yielding to other tasks of the event loop."""
        await asyncio.sleep(0)
        result = self._toolbox.find(call)
        if not isinstance(result, ToolResult):
            tool = result
            context = Context(self._task, turn=self._turn)
            self._turn += 1
            result = await self._leases.act(
                tool.environments, lambda envs: tool.run(call.arguments, context=context, environments=envs)
            )
        return CallAnswer(_mask_durations(result.observation), result.status, result.ends_chain)

    async def expert(self) -> ToolCall | str:
        """Return the expert's next call or final answer."""
        action: ToolCall | str = await threads.call(self._instance.expert)
        return action

    def state(self) -> dict[str, Any]:
        """The public attributes that are plain data; other values cannot be compared."""
        public = {name: value for name, value in vars(self._instance).items() if not name.startswith("_")}
        return {name: _mask_durations(value) for name, value in public.items() if _is_plain(value)}

    async def replay(self, calls: Iterable[ToolCall]) -> Trace:
        """Make the calls, until one ends the chain."""
        replayed_calls: list[ToolCall] = []
        answers: list[CallAnswer] = []
        for call in calls:
            replayed_calls.append(call)
            answers.append(await self.act(call))
            if answers[-1].ends_chain:
                break
        return Trace(tuple(replayed_calls), tuple(answers), self.state())


def format_call(call: ToolCall) -> str:
    """Format a call as `name(argument=value)`, with long values cut."""
    arguments = (f"{name}={value!r:.40}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def _mask_durations(value: Any) -> Any:
    return _DURATION.sub("… s", value) if isinstance(value, str) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)


# ── calls generated from schemas ──


def invalid_calls(toolbox: Toolbox, task: Task, random: Random) -> Iterator[ToolCall]:
    """Yield calls of unknown tools, with missing or unknown arguments, and with arguments of wrong type or size."""
    yield ToolCall("no_such_tool", {"x": 1})
    yield ToolCall("", problem="it has no name")
    for tool in sorted(toolbox, key=lambda tool: tool.ends_chain):
        yield ToolCall(tool.name, {**valid_arguments(tool, task, random), "no_such_argument": 1})
        for name, spec in tool.schema["function"]["parameters"]["properties"].items():
            valid = valid_arguments(tool, task, random)
            yield ToolCall(tool.name, {other: value for other, value in valid.items() if other != name})
            for bad in (*NOT_TEXT, *ODD_TEXTS) if _takes_text(spec) else (*NOT_TEXT, LARGE, -(10**30), "7"):
                yield ToolCall(tool.name, {**valid, name: bad})


def valid_arguments(tool: Tool, task: Task, random: Random) -> dict[str, Any]:
    """The required arguments of a tool, matching its schema; texts are words of the task's question."""
    words = re.findall(r"\w+", task.question)[:200] or ["something"]
    parameters = tool.schema["function"]["parameters"]
    return {name: _value(parameters["properties"][name], words, random) for name in parameters.get("required", [])}


def _value(spec: Mapping[str, Any], words: list[str], random: Random) -> Any:
    for key in ("enum", "anyOf", "oneOf"):
        if choices := spec.get(key):
            choice = random.choice(choices)
            return choice if key == "enum" else _value(choice, words, random)
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
            properties = spec.get("properties", {})
            return {name: _value(properties[name], words, random) for name in spec.get("required", [])}
        case "null":
            return None
        case _:
            return random.choice(words)


def _takes_text(spec: Mapping[str, Any]) -> bool:
    alternatives = [*spec.get("anyOf", ()), *spec.get("oneOf", ())]
    return spec.get("type") == "string" or any(map(_takes_text, alternatives))
