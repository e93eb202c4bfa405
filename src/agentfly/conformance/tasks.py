"""Checks every task on its own: the expert earns the full reward, and a chain that does nothing earns none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentfly.agents import HFAgent
from agentfly.conformance.outcome_properties import FULL_REWARD, MAX_TURNS
from agentfly.conformance.subject import PropertyFailed, PropertyResult, PropertyStatus, Subject, format_error
from agentfly.environment import Environment
from agentfly.errors import AgentFlyError
from agentfly.sft.demonstrations import demonstrate
from agentfly.trajectory import Trajectory
from agentfly.types import Task


async def check_tasks(
    env_class: type[Environment],
    tasks: Sequence[Task],
    *,
    instances: int,
    on_result: Callable[[PropertyResult], None],
) -> bool:
    """Check tasks, as many at once as `instances`, and pass each result to `on_result`. Returns whether all pass."""
    slots = asyncio.Semaphore(instances)
    async with Subject(env_class, tasks).agent() as agent:

        async def check(task: Task) -> bool:
            async with slots:
                try:
                    result = PropertyResult(task.id, PropertyStatus.PASS, await _check_task(agent, task))
                except PropertyFailed as failure:
                    result = PropertyResult(task.id, PropertyStatus.FAIL, str(failure))
                except AgentFlyError as error:
                    result = PropertyResult(task.id, PropertyStatus.FAIL, format_error(error))
            on_result(result)
            return result.status is PropertyStatus.PASS

        return all(await asyncio.gather(*map(check, tasks)))


async def _check_task(agent: HFAgent, task: Task) -> str:
    (idle_chain,) = await agent.run([task])
    idle_reward = _require_reward(idle_chain, "a chain that does nothing")
    if idle_reward != 0:
        raise PropertyFailed(f"a chain that does nothing earns {idle_reward:g} instead of 0: its tests do not test it")
    demonstrations = await demonstrate(agent, [task], threshold=FULL_REWARD, max_turns=MAX_TURNS)
    (expert_chain,) = (*demonstrations.accepted, *demonstrations.rejected)
    expert_reward = _require_reward(expert_chain, "the expert's chain")
    if expert_reward != FULL_REWARD:
        raise PropertyFailed(
            f"the expert earns {expert_reward:g} instead of {FULL_REWARD:g}{_describe_outcome(expert_chain)}"
        )
    return f"the expert earns {expert_reward:g}, doing nothing 0"


def _describe_outcome(chain: Trajectory) -> str:
    """The metrics and the last observation of a chain: without them, a low reward has no visible cause."""
    metrics = chain.score.metrics if chain.score is not None else {}
    observations = [message.content for message in chain.messages if message.role == "tool"]
    return (f" ({', '.join(f'{name} {value}' for name, value in metrics.items())})" if metrics else "") + (
        f"; its last observation: {str(observations[-1])[-500:].strip()}" if observations else ""
    )


def _require_reward(chain: Trajectory, subject: str) -> float:
    if chain.reward is None:
        reason = chain.failures[-1].message if chain.failures else chain.stop.value
        raise PropertyFailed(f"{subject} has no reward: {reason}")
    return chain.reward
