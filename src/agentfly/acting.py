"""The calls of one turn: run together, those to one environment in order, and none after one that ended the chain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from agentfly.events import Called, Observed, Observer
from agentfly.resources import Leases
from agentfly.tooling import Context, Tool, Toolbox, ToolResult
from agentfly.trajectory import CallStatus
from agentfly.types import ToolCall

T = TypeVar("T")


class Actions:
    """The calls of one turn, as they are run."""

    __slots__ = ("_context", "_ended", "_leases", "_observer", "_toolbox")

    def __init__(self, toolbox: Toolbox, leases: Leases, context: Context, observer: Observer | None) -> None:
        self._toolbox, self._leases, self._context, self._observer = toolbox, leases, context, observer
        self._ended = False

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result for each call, in their order. Raises EnvironmentFault only."""
        found = [self._toolbox.find(call) for call in calls]
        first_end = next((i for i, f in enumerate(found) if isinstance(f, Tool) and f.ends_chain), len(found))
        pairs = list(zip(calls, found, strict=True))
        results = await _together([self._call(call, tool) for call, tool in pairs[:first_end]])
        for call, tool in pairs[first_end:]:
            results.append(await self._call(call, tool))
        return results

    async def _call(self, call: ToolCall, found: Tool | ToolResult) -> ToolResult:
        if isinstance(found, ToolResult):
            result = found
        elif not found.environments:
            result = await self._run(call, found)
        else:
            locks = [self._leases.acting(kind) for kind in found.environments]
            for lock in locks:  # always in the same order of kinds, so that no two calls wait for each other
                await lock.acquire()
            try:
                result = await self._run(call, found)
            finally:
                for lock in locks:
                    lock.release()
        if self._observer is not None:
            self._observer(Observed(self._context.group, self._context.chain, self._context.turn, call, result))
        return result

    async def _run(self, call: ToolCall, tool: Tool) -> ToolResult:
        if self._ended:
            return ToolResult("(not run: the chain had ended)", CallStatus.SKIPPED, name=tool.name)
        if self._observer is not None:
            self._observer(Called(self._context.group, self._context.chain, self._context.turn, call))
        environments = {kind: await self._leases.get(kind) for kind in tool.environments}
        result = await tool.run(call.arguments, context=self._context, environments=environments)
        self._ended = self._ended or result.ends_chain
        return result


async def _together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in coroutines]
    except* Exception as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
