"""Helpers for the tests of games: a scripted agent, and an environment that is reset for a row."""

from __future__ import annotations

from typing import Any, TypeVar

from agentfly.agents import HFAgent
from agentfly.environment import Environment
from agentfly.rewards import game_won
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task, ToolCall

W = TypeVar("W", bound=Environment)


def agent_of(kind: type[Environment], script: Any = "-", reward: Any = game_won) -> HFAgent:
    return HFAgent(
        tools=[kind], reward=reward, template="chatml", backend="scripted", backend_config={"script": script}
    )


async def reset_env(kind: type[W], row: Any) -> W:
    env = kind()
    await env.start()
    await env.reset(Task.of(row))
    return env


async def winning(env: Any) -> list[ToolCall]:
    """What the expert does to the end, and has done."""
    calls = []
    while isinstance(call := env.expert(), ToolCall):
        calls.append(call)
        await getattr(env, call.name)(**call.arguments)
    return calls


async def count_demonstrations(kind: type[Environment], rows: list[dict[str, Any]], reward: Any = game_won) -> int:
    """How many of the rows the expert does through the manager and its tools."""
    agent = agent_of(kind, reward=reward)
    try:
        demonstrations = await demonstrate(agent, rows, max_turns=60)
        assert not demonstrations.reasons
        return len(demonstrations.accepted)
    finally:
        await agent.manager.close()


async def answers(kind: type[Environment], row: Any, *replies: str, reward: Any = game_won) -> tuple[list[str], Any]:
    """What the model reads after each thing it says, and the chain."""
    agent = agent_of(kind, [*replies, "Enough."], reward)
    try:
        (chain,) = await agent.run(row, max_turns=len(replies) + 1)
    finally:
        await agent.manager.close()
    return [message.text for message in chain.messages if message.role == "tool"], chain
