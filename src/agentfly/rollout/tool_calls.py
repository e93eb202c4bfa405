"""Runs the calls of one turn: concurrently, in order within one environment, and none after the chain has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentfly.environment import Environment
from agentfly.errors import ToolTimeout
from agentfly.resources import Leases
from agentfly.rollout.events import Observer, ToolCalled, ToolReturned
from agentfly.tooling import Context, Tool, Toolbox, ToolResult
from agentfly.trajectory import CallStatus
from agentfly.types import ToolCall


@dataclass(slots=True)
class ToolRunner:
    """Runs the calls of one turn."""

    toolbox: Toolbox
    leases: Leases
    context: Context
    observer: Observer | None

    async def run(self, calls: Sequence[ToolCall], limit: int) -> list[ToolResult]:
        """Return one result per call, in the order of the calls. Raises only EnvironmentFault, and no ToolTimeout.

        Calls above `limit` are not run; their result states the limit. The first call of a tool that ends the chain
        (`ends_chain=True`) runs after all earlier calls, and later calls run one by one after it. A tool that ends the
        chain by its return value stops the later calls in the same environment, and those after the ending tool.
        """
        tools = [self.toolbox.find(call) for call in calls[:limit]]
        for call in calls[limit:]:
            limited = f"at most {limit} tool calls are run per reply. This call and all calls after it were not run."
            tools.append(ToolResult(f"Error: {limited}", CallStatus.INVALID, name=call.name))
        if len(calls) == 1:
            return [await self._call(calls[0], tools[0])]
        results: list[ToolResult] = [_PENDING] * len(calls)

        async def run_in_order(indices: Sequence[int], ended: bool = False) -> None:
            for index in indices:
                call, tool = calls[index], tools[index]
                if ended:
                    tool = ToolResult("(not run: the chain had ended)", CallStatus.SKIPPED, name=call.name)
                results[index] = await self._call(call, tool)
                ended = ended or results[index].ends_chain

        ending = next((i for i, tool in enumerate(tools) if isinstance(tool, Tool) and tool.ends_chain), len(calls))
        batches = [run_in_order(indices) for indices in _group_by_environment(tools[:ending])]
        if len(batches) == 1:
            await batches[0]
        else:  # the first fault cancels the other calls, and is raised when they have stopped
            tasks = [asyncio.ensure_future(batch) for batch in batches]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        await run_in_order(range(ending, len(calls)), ended=any(result.ends_chain for result in results[:ending]))
        return results

    async def _call(self, call: ToolCall, tool: Tool | ToolResult) -> ToolResult:
        """Run one call; a ToolResult in place of the tool is the result of a call that is not run."""
        context, observer = self.context, self.observer
        if isinstance(tool, ToolResult):
            result = tool
        else:
            if observer is not None:
                observer(ToolCalled(context.group, context.chain, context.turn, call))
            if tool.environments:
                started = time.perf_counter()
                try:
                    result = await self.leases.act(
                        tool.environments,
                        lambda environments: tool.run(call.arguments, context=context, environments=environments),
                    )
                except ToolTimeout as timeout:  # the busy environment can take no further call
                    result = ToolResult(
                        f"Error: {timeout}",
                        CallStatus.TIMEOUT,
                        ends_chain=True,
                        name=tool.name,
                        seconds=time.perf_counter() - started,
                    )
            else:
                result = await tool.run(call.arguments, context=context, environments={})
        if observer is not None:
            observer(ToolReturned(context.group, context.chain, context.turn, call, result))
        return result


_PENDING = ToolResult("", CallStatus.SKIPPED)


def _group_by_environment(tools: Sequence[Tool | ToolResult]) -> list[list[int]]:
    """Group the indices of calls that share an environment, directly or through another call; others are alone."""
    groups: list[tuple[set[type[Environment]], list[int]]] = []
    for index, tool in enumerate(tools):
        env_classes = set(tool.environments) if isinstance(tool, Tool) else set()
        indices = [index]
        for group in [group for group in groups if group[0] & env_classes]:
            groups.remove(group)
            env_classes = env_classes | group[0]
            indices = group[1] + indices
        groups.append((env_classes, sorted(indices)))
    return [indices for _, indices in groups]
