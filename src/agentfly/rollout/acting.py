"""The calls of one turn: run together, those to one environment in order, and none after one that ended the chain."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from agentfly.environment import Environment
from agentfly.outcome import CallStatus
from agentfly.resources import Leases
from agentfly.rollout.events import Called, Observed, Observer
from agentfly.tooling import Context, Tool, Toolbox, ToolResult
from agentfly.types import ToolCall

_SKIPPED = "(not run: the chain had ended)"


class Actions:
    """The calls of one turn, as they are run."""

    __slots__ = ("_context", "_leases", "_observer", "_toolbox")

    def __init__(self, toolbox: Toolbox, leases: Leases, context: Context, observer: Observer | None) -> None:
        self._toolbox, self._leases, self._context, self._observer = toolbox, leases, context, observer

    async def run(self, calls: Sequence[ToolCall], limit: int) -> list[ToolResult]:
        """One result for each call, in their order. Raises EnvironmentFault only.

        Calls above the `limit` are not run; their result states it.
        From the first call to a tool that ends the chain on, calls are run one by one, after those before it. A tool
        that decides to end the chain as it runs stops the calls behind it in the same environment, and those.
        """
        found = [self._toolbox.find(call) for call in calls[:limit]]
        found += [_over_limit(call, limit) for call in calls[limit:]]
        if len(calls) == 1:
            return [await self._call(calls[0], found[0])]
        results: list[ToolResult] = [_NOT_YET] * len(calls)

        async def in_order(places: Sequence[int], ended: bool = False) -> None:
            for at in places:
                results[at] = self._skip(calls[at]) if ended else await self._call(calls[at], found[at])
                ended = ended or results[at].ends_chain

        last = next((i for i, tool in enumerate(found) if isinstance(tool, Tool) and tool.ends_chain), len(calls))
        await _together([in_order(lane) for lane in _lanes(found[:last])])
        await in_order(range(last, len(calls)), ended=any(result.ends_chain for result in results[:last]))
        return results

    async def _call(self, call: ToolCall, found: Tool | ToolResult) -> ToolResult:
        if isinstance(found, ToolResult):
            result = found
        else:
            if self._observer is not None:
                self._observer(Called(self._context.group, self._context.chain, self._context.turn, call))
            result = await self._run(found, call.arguments)
        return self._seen(call, result)

    async def _run(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        if not tool.environments:
            return await tool.run(arguments, context=self._context, environments={})
        return await self._leases.act(
            tool.environments, lambda lent: tool.run(arguments, context=self._context, environments=lent)
        )

    def _skip(self, call: ToolCall) -> ToolResult:
        return self._seen(call, ToolResult(_SKIPPED, CallStatus.SKIPPED, name=call.name))

    def _seen(self, call: ToolCall, result: ToolResult) -> ToolResult:
        if self._observer is not None:
            self._observer(Observed(self._context.group, self._context.chain, self._context.turn, call, result))
        return result


_NOT_YET = ToolResult("", CallStatus.SKIPPED)


def _over_limit(call: ToolCall, limit: int) -> ToolResult:
    told = f"Error: at most {limit} tool calls are run per reply. This call and all calls after it were not run."
    return ToolResult(told, CallStatus.INVALID, name=call.name)


def _lanes(found: Sequence[Tool | ToolResult]) -> list[list[int]]:
    """The places of the calls that must keep their order, by the environments they share; the others alone."""
    lanes: list[tuple[set[type[Environment]], list[int]]] = []
    for at, tool in enumerate(found):
        kinds, places = set(tool.environments) if isinstance(tool, Tool) else set(), [at]
        for lane in [lane for lane in lanes if lane[0] & kinds]:
            lanes.remove(lane)
            kinds, places = kinds | lane[0], lane[1] + places
        lanes.append((kinds, sorted(places)))
    return [places for _, places in lanes]


async def _together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first fault stops the others and is raised once they have stopped."""
    if len(coroutines) == 1:
        await coroutines[0]
        return
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
