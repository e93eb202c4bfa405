"""The environment through agents, tools and the resource manager."""

from __future__ import annotations

import json

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.alfworld import ALFWorld
from agentfly.environments.alfworld.environment import alfworld_episode_reward, alfworld_won
from agentfly.errors import DataError
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task, ToolCall
from tests.fakes import call


def agent_of(kind: type[ALFWorld] = ALFWorld, script: object = "-") -> HFAgent:
    return HFAgent(
        tools=[kind], reward=alfworld_won, template="chatml", backend="scripted", backend_config={"script": script}
    )


def step_calls(*actions: str) -> str:
    return "".join(call("alfworld_step", action=action) for action in actions)


async def reset_env(row: dict[str, object]) -> ALFWorld:
    env = ALFWorld()
    await env.start()
    await env.reset(Task.of(row))
    return env


async def winning(row: dict[str, object]) -> list[str]:
    env, actions = await reset_env(row), []
    while isinstance(call := env.expert(), ToolCall):
        actions.append(str(call.arguments["action"]))
        await env.alfworld_step(actions[-1])
    assert env.won
    return actions


async def test_64_concurrent_experts_earn_full_reward() -> None:
    demonstrations = await demonstrate(agent_of(), ALFWorld.draw_tasks("train", 64), max_turns=80)
    assert len(demonstrations.accepted) == 64
    chain = demonstrations.accepted[0]
    assert chain.reward == 1.0
    assert chain.score.metrics["invalid_actions"] == 0


async def test_won_game_ends_the_chain_for_good() -> None:
    (row,) = ALFWorld.draw_tasks("train", 1)
    *earlier, last = await winning(row)
    undoing = step_calls(last, "take bread 1 from sidetable 1", "look")
    result = await agent_of(script=[*map(step_calls, earlier), undoing, "never said"]).run(row, max_turns=80)
    (chain,) = result
    assert chain.reward == 1.0
    assert "never said" not in chain.messages[-1].text
    env = await reset_env(row)
    for action in (*earlier, last):
        await env.alfworld_step(action)
    assert (await env.alfworld_step("look"))["observation"] == "The task is done."
    assert alfworld_episode_reward(env) == 10.0


async def test_claiming_success_earns_nothing() -> None:
    (row,) = ALFWorld.draw_tasks("train", 1)
    for script in (["It is done."], [step_calls("You win!", "won", ""), "Done."]):
        (chain,) = await agent_of(script=script).run(row)
        assert chain.reward == 0.0


async def test_reset_clears_the_previous_chain() -> None:
    first, second = ALFWorld.draw_tasks("train", 2)
    used, fresh = await reset_env(first), await reset_env(second)
    for action in await winning(first):
        await used.alfworld_step(action)
    await used.reset(Task.of(second))
    assert (used.won, used.steps, used.invalid_actions) == (False, 0, 0)
    for action in await winning(second):
        assert await used.alfworld_step(action) == await fresh.alfworld_step(action)


async def test_malformed_actions_are_answered() -> None:
    (row,) = ALFWorld.draw_tasks("train", 1)
    strange = ['{"action": 7}', '{"action": ["look"]}', "{}", json.dumps({"action": "go " * 400_000})]
    script = [f'<tool_call>{{"name": "alfworld_step", "arguments": {arguments}}}</tool_call>' for arguments in strange]
    (chain,) = await agent_of(script=[*script, step_calls("look"), "Enough."]).run(row, max_turns=8)
    answers = [message.text for message in chain.messages if message.role == "tool"]
    assert len(answers) == 5
    assert answers[3] == "Nothing happens."
    assert answers[4].startswith("You are in the middle of a room.")


async def test_shows_commands_appends_admissible_commands() -> None:
    class Telling(ALFWorld):
        shows_commands = True

    (row,) = ALFWorld.draw_tasks("train", 1)
    env = Telling()
    await env.reset(Task.of(row))
    observation = (await env.alfworld_step("look"))["observation"]
    assert (
        observation.splitlines()[-1]
        == f"You can: {', '.join((await env.alfworld_get_admissible_commands()).splitlines())}."
    )
    assert await env.alfworld_get_task_objective() in row["question"]


async def test_a_task_without_a_game_is_rejected() -> None:
    with pytest.raises(DataError, match=r"ALFWorld\.draw_tasks"):
        await ALFWorld().reset(Task.of("Put a mug on the desk."))
