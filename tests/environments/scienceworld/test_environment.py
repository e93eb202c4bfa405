"""The environment through agents, tools and the resource manager."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.scienceworld import ScienceWorld
from agentfly.errors import DataError, EnvironmentFault
from agentfly.rewards import scienceworld_episode_reward, scienceworld_progress, scienceworld_score
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task, ToolCall
from tests.fakes import call

pytestmark = pytest.mark.usefixtures("shared_java")

QUICK = ["find-plant", "find-animal", "find-living-thing", "find-non-living-thing", "identify-life-stages-1"]
WALK = ["look around", "teleport to kitchen", "activate stove", "pick up lighter", "inventory", "nonsense"]
"""Nothing ambiguous: the order in which the simulator then asks back is not the same twice."""


def row(name: str = "boil", number: int = 0, **columns: object) -> dict[str, object]:
    return {"question": "Do it.", "task_name": name, "variation_idx": number, **columns}


def agent_of(script: object = "-", reward: object = scienceworld_score) -> HFAgent:
    return HFAgent(
        tools=[ScienceWorld], reward=reward, template="chatml", backend="scripted", backend_config={"script": script}
    )


def step_calls(*actions: str) -> str:
    return "".join(call("scienceworld_step", action=action) for action in actions)


@pytest.fixture
async def env() -> AsyncIterator[ScienceWorld]:
    env = ScienceWorld()
    await env.start()
    yield env
    await env.close()


async def walk(env: ScienceWorld, columns: dict[str, object]) -> list[object]:
    """The observations of the walk, lines sorted: the simulator lists things with the same name in varying order."""
    await env.reset(Task.of(columns))
    steps = [await env.scienceworld_step(action) for action in WALK]
    return [(sorted(step["observation"].splitlines()), step["score"], step["ends_chain"]) for step in steps]


async def test_concurrent_experts_earn_full_reward() -> None:
    agent = agent_of()
    demonstrations = await demonstrate(agent, ScienceWorld.draw_tasks("train", 5, tasks=QUICK), max_turns=60)
    await agent.manager.close()
    assert len(demonstrations.accepted) == 5, demonstrations.reasons
    metrics = demonstrations.accepted[0].score.metrics
    assert (metrics["success"], metrics["failed"], metrics["invalid_actions"]) == (1.0, 0.0, 0)
    assert metrics["steps"] == len(demonstrations.accepted[0].turns)


async def test_sixteen_instances_in_one_process_are_isolated(env: ScienceWorld) -> None:
    class Crowded(ScienceWorld):
        share_process = 100

    rows = [row(("boil", "find-plant", "freeze", "use-thermometer")[number % 4], number) for number in range(16)]
    alone = [await walk(env, row) for row in rows]
    crowd = [Crowded() for _ in rows]
    await asyncio.gather(*(member.start() for member in crowd))
    assert len({member._jvm.pid for member in crowd}) == 1
    together = await asyncio.gather(*map(walk, crowd, rows))
    await asyncio.gather(*(member.close() for member in crowd))
    assert together == alone


async def test_reset_clears_the_previous_chain(env: ScienceWorld) -> None:
    first = await walk(env, row("boil", 3))
    await env.scienceworld_step("focus on lighter")
    assert (env.score, env.ended, env.steps) == (-100, True, len(WALK) + 1)
    await walk(env, row("find-plant", 5, simplification=""))
    assert await walk(env, row("boil", 3)) == first
    assert (env.ended, env.steps, env.invalid_actions) == (False, len(WALK), 1)


async def test_wrong_focus_ends_the_chain_and_loses_the_progress() -> None:
    commands = ["open door to hallway", "go to hallway"]
    script = [step_calls(*commands), step_calls("focus on agent", "reset task", "look around"), "never said"]
    rows = ScienceWorld.draw_tasks("train", 1, tasks=["find-plant"])
    (chain,) = await agent_of(script, reward={scienceworld_score: 1.0, scienceworld_progress: 1.0}).run(rows)
    assert "never said" not in chain.messages[-1].text
    assert chain.score.metrics["scienceworld_score"] == 0.0
    assert chain.score.metrics["scienceworld_score/failed"] == 1.0
    earned, lost = chain.score.per_turn
    assert earned == -lost > 0


async def test_ended_task_stays_ended(env: ScienceWorld) -> None:
    await env.reset(Task.of(row("find-plant", 77)))
    gains = []
    while isinstance(call := await env.expert(), ToolCall):
        gains.append((await env.scienceworld_step(**call.arguments))["score"])
    assert (call, env.score, gains[-1]) == ("Done.", 100, 100)
    assert scienceworld_episode_reward(env) == 10.0
    result = await env.scienceworld_step("reset task")
    assert result == {"observation": "The task has ended.", "score": 100, "ends_chain": True}
    assert scienceworld_score(env)["reward"] == 1.0


async def test_progress_sums_to_the_score() -> None:
    agent = agent_of(reward=scienceworld_progress)
    demonstrations = await demonstrate(agent, ScienceWorld.draw_tasks("train", 1, tasks=["find-animal"]), max_turns=60)
    await agent.manager.close()
    per_turn = demonstrations.accepted[0].score.per_turn
    assert sum(per_turn) == pytest.approx(1.0)
    assert sum(gain > 0 for gain in per_turn) > 3


async def test_idle_agent_earns_nothing() -> None:
    for script in (["It is done."], [step_calls("look around", "inventory", "wait", "success"), "Done."]):
        agent = agent_of(script)
        (chain,) = await agent.run(row())
        await agent.manager.close()
        assert chain.reward == 0.0


async def test_expert_continues_after_other_actions(env: ScienceWorld) -> None:
    await env.reset(Task.of(row("find-plant", 77)))
    await env.scienceworld_step("inventory")
    first = await env.expert()
    assert isinstance(first, ToolCall)
    await env.scienceworld_step(**first.arguments)
    await env.scienceworld_step("look around")
    second = await env.expert()
    assert isinstance(second, ToolCall)
    assert second != first


async def test_valid_actions_are_listed_briefly(env: ScienceWorld) -> None:
    await env.reset(Task.of(row()))
    await env.scienceworld_step("teleport to kitchen")
    listed = await env.scienceworld_valid_actions()
    assert "move OBJ to OBJ" in listed
    assert "thermometer" in listed
    assert "pick up thermometer" in (await env.scienceworld_valid_actions("thermometer")).splitlines()
    *some, last = (await env.scienceworld_valid_actions("O")).splitlines()
    assert len(some) == 100
    assert last.endswith("Use a longer word.")
    assert len("\n".join(some)) < 5000
    assert await env.scienceworld_valid_actions("unicorn") == "Nothing can be done with 'unicorn'."
    assert env.steps == 1


async def test_malformed_actions_are_answered() -> None:
    strange = ['{"action": 7}', '{"action": ["look"]}', "{}", json.dumps({"action": "go " * 400_000}),
               json.dumps({"action": "loo\u0000k \n\u2028 ∞ 🜁"})]  # fmt: skip
    script = [
        f'<tool_call>{{"name": "scienceworld_step", "arguments": {arguments}}}</tool_call>' for arguments in strange
    ]
    agent = agent_of([*script, step_calls("look around"), "Enough."])
    (chain,) = await agent.run(row(), max_turns=8)
    await agent.manager.close()
    answers = [message.text for message in chain.messages if message.role == "tool"]
    assert len(answers) == 6
    assert answers[3] == answers[4] == "No known action matches that input."
    assert answers[5].startswith("This room is called the")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"task_name": "dance"}, "there is no task 'dance'; there are boil, melt"),
        ({"task_name": 7}, "there is no task 7"),
        ({"variation_idx": 30}, "boil has variations 0 to 29; there is no 30"),
        ({"variation_idx": -1}, "there is no -1"),
        ({"variation_idx": "0"}, "must be an integer, not '0'"),
        ({"simplification": "easier"}, "there is no simplification 'easier'; there are easy"),
        ({"simplification": ["easy"]}, "no simplification"),
        ({"task_name": "power-component", "simplification": "openDoors,noElectricalAction"}, "about electricity"),
        ({"task_name": None}, r"ScienceWorld\.draw_tasks"),
    ],
)
async def test_unknown_names_are_rejected(env: ScienceWorld, columns: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        await env.reset(Task.of({**row(), **columns}))
    await env.reset(Task.of(row()))  # and the env is none the worse


async def test_closed_environment_raises(env: ScienceWorld) -> None:
    await env.reset(Task.of(row()))
    await env.close()
    await env.close()
    with pytest.raises(EnvironmentFault, match="closed"):
        await env.scienceworld_step("look around")
