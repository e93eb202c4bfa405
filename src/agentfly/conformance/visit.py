"""Acting in one instance as a chain does: lent by the manager, through the tools."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentfly import threads
from agentfly.environment import Environment
from agentfly.outcome import CallStatus
from agentfly.resources import Leases, ResourceManager
from agentfly.tooling import Context, Toolbox, ToolResult
from agentfly.types import Content, Task, ToolCall

_TIMES = re.compile(r"\b\d+\.\d+ ?s\b")
"""How long something took, which is told otherwise every time."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a call was answered."""

    observation: Content
    status: CallStatus
    ends: bool

    @property
    def brief(self) -> str:
        return repr(self.observation if len(self.observation) < 100 else f"{str(self.observation)[:100]}…")


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls, what they were answered, and what was left."""

    calls: tuple[ToolCall, ...]
    told: tuple[Told, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    """The public attributes that are plain data."""

    def difference(self, other: Trace) -> str:
        """The first thing that another run of the same calls did otherwise; empty where nothing is."""
        for number, (call, ours, theirs) in enumerate(zip(self.calls, self.told, other.told, strict=False), 1):
            if ours != theirs:
                return f"call {number}, {brief(call)}, was answered {theirs.brief}, and not {ours.brief}"
        for name in sorted({*self.state, *other.state}):
            if self.state.get(name) != other.state.get(name):
                return f"{name} was {other.state.get(name)!r:.100} afterwards, and not {self.state.get(name)!r:.100}"
        return ""


class Visitor:
    """Somebody whom an instance is lent."""

    def __init__(self, toolbox: Toolbox, task: Task, leases: Leases, instance: Environment) -> None:
        self._toolbox, self._task, self._leases, self._instance = toolbox, task, leases, instance
        self._turn = 0

    async def act(self, call: ToolCall) -> Told:
        """What a call comes to. The others get a turn before it."""
        await asyncio.sleep(0)
        found = self._toolbox.find(call)
        if not isinstance(found, ToolResult):
            tool, context = found, Context(self._task, turn=self._turn)
            self._turn += 1
            found = await self._leases.act(
                tool.environments, lambda lent: tool.run(call.arguments, context=context, environments=lent)
            )
        return Told(_timeless(found.observation), found.status, found.ends_chain)

    async def expert(self) -> ToolCall | str:
        """What the expert would do."""
        said: ToolCall | str = await threads.call(self._instance.expert)
        return said

    def state(self) -> dict[str, Any]:
        """The public attributes that are plain data: others have no meaning but to the environment."""
        there = {name: value for name, value in vars(self._instance).items() if not name.startswith("_")}
        return {name: _timeless(value) for name, value in there.items() if _is_plain(value)}

    async def replay(self, calls: Iterable[ToolCall]) -> Trace:
        """Make the same calls again, as far as the chain goes."""
        made: list[ToolCall] = []
        told: list[Told] = []
        for call in calls:
            made.append(call)
            told.append(await self.act(call))
            if told[-1].ends:
                break
        return Trace(tuple(made), tuple(told), self.state())


@asynccontextmanager
async def visit(
    kind: type[Environment], toolbox: Toolbox, manager: ResourceManager, task: Task
) -> AsyncIterator[Visitor]:
    """Be lent an instance that is reset for the task."""
    group = manager.group()
    try:
        async with manager.leases(task, [kind], group=group, chain="env check") as leases:
            yield Visitor(toolbox, task, leases, await leases.get(kind))
    finally:
        group.close()


def brief(call: ToolCall) -> str:
    """A call in few words."""
    shown = (f"{name}={value!r:.40}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(shown)})"


def _timeless(said: Any) -> Any:
    """A text without how long something took."""
    return _TIMES.sub("… s", said) if isinstance(said, str) else said


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes)
