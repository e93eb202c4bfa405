"""The environment: through agents, tools and the resource manager."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.scienceworld import ScienceWorld
from agentfly.errors import DataError, EnvironmentFault
from agentfly.rewards import scienceworld_episode_reward, scienceworld_progress, scienceworld_score
from agentfly.training.demonstrations import demonstrate
from agentfly.types import Task, ToolCall

pytestmark = pytest.mark.usefixtures("kept_java")

QUICK = ["find-plant", "find-animal", "find-living-thing", "find-non-living-thing", "identify-life-stages-1"]
WALK = ["look around", "teleport to kitchen", "activate stove", "pick up lighter", "inventory", "nonsense"]
"""Nothing ambiguous: the order in which the simulator then asks back is not the same twice."""


def row(name: str = "boil", number: int = 0, **columns: object) -> dict[str, object]:
    return {"question": "Do it.", "task_name": name, "variation_idx": number, **columns}


def agent_of(script: object = "-", reward: object = scienceworld_score) -> HFAgent:
    return HFAgent(
        tools=[ScienceWorld], reward=reward, template="chatml", backend="scripted", backend_config={"script": script}
    )


def called(*actions: str) -> str:
    calls = ({"name": "scienceworld_step", "arguments": {"action": action}} for action in actions)
    return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


@pytest.fixture
async def world() -> AsyncIterator[ScienceWorld]:
    made = ScienceWorld()
    await made.start()
    yield made
    await made.close()


async def walked(world: ScienceWorld, columns: dict[str, object]) -> list[object]:
    """What is seen on the walk. Things that are called alike are told in an order that is not the same twice."""
    await world.reset(Task.of(columns))
    steps = [await world.scienceworld_step(action) for action in WALK]
    return [(sorted(step["observation"].splitlines()), step["score"], step["ends_chain"]) for step in steps]


async def test_experts_of_several_tasks_at_once_earn_everything() -> None:
    agent = agent_of()
    shown = await demonstrate(agent, ScienceWorld.draw_tasks("train", 5, tasks=QUICK), max_turns=60)
    await agent.manager.close()
    assert len(shown.kept) == 5, shown.reasons
    metrics = shown.kept[0].score.metrics
    assert (metrics["success"], metrics["failed"], metrics["in_vain"]) == (1.0, 0.0, 0)
    assert metrics["steps"] == len(shown.kept[0].turns)


async def test_sixteen_at_once_in_one_process_see_what_each_sees_alone(world: ScienceWorld) -> None:
    class Crowded(ScienceWorld):
        share_process = 100

    rows = [row(("boil", "find-plant", "freeze", "use-thermometer")[number % 4], number) for number in range(16)]
    alone = [await walked(world, each) for each in rows]
    crowd = [Crowded() for _ in rows]
    await asyncio.gather(*(each.start() for each in crowd))
    assert len({each._world._jvm.pid for each in crowd}) == 1
    together = await asyncio.gather(*map(walked, crowd, rows))
    await asyncio.gather(*(each.close() for each in crowd))
    assert together == alone


async def test_an_instance_keeps_nothing_of_the_last_chain(world: ScienceWorld) -> None:
    first = await walked(world, row("boil", 3))
    await world.scienceworld_step("focus on lighter")
    assert (world.score, world.ended, world.steps) == (-100, True, len(WALK) + 1)
    await walked(world, row("find-plant", 5, simplification=""))
    assert await walked(world, row("boil", 3)) == first
    assert (world.ended, world.steps, world.in_vain) == (False, len(WALK), 1)


async def test_a_wrong_choice_ends_the_chain_and_costs_all_that_was_earned() -> None:
    begun = ["open door to hallway", "go to hallway"]
    script = [called(*begun), called("focus on agent", "reset task", "look around"), "never said"]
    rows = ScienceWorld.draw_tasks("train", 1, tasks=["find-plant"])
    (chain,) = await agent_of(script, reward={scienceworld_score: 1.0, scienceworld_progress: 1.0}).run(rows)
    assert "never said" not in chain.messages[-1].text
    assert chain.score.metrics["scienceworld_score"] == 0.0
    assert chain.score.metrics["scienceworld_score/failed"] == 1.0
    earned, lost = chain.score.per_turn
    assert earned == -lost > 0


async def test_what_ended_cannot_be_undone(world: ScienceWorld) -> None:
    await world.reset(Task.of(row("find-plant", 77)))
    gains = []
    while isinstance(call := await world.expert(), ToolCall):
        gains.append((await world.scienceworld_step(**call.arguments))["score"])
    assert (call, world.score, gains[-1]) == ("Done.", 100, 100)
    assert scienceworld_episode_reward(world) == 10.0
    after = await world.scienceworld_step("reset task")
    assert after == {"observation": "The task has ended.", "score": 100, "ends_chain": True}
    assert scienceworld_score(world)["reward"] == 1.0


async def test_progress_adds_up_to_the_score() -> None:
    agent = agent_of(reward=scienceworld_progress)
    shown = await demonstrate(agent, ScienceWorld.draw_tasks("train", 1, tasks=["find-animal"]), max_turns=60)
    await agent.manager.close()
    per_turn = shown.kept[0].score.per_turn
    assert sum(per_turn) == pytest.approx(1.0)
    assert sum(gain > 0 for gain in per_turn) > 3


async def test_the_lazy_earn_nothing() -> None:
    for script in (["It is done."], [called("look around", "inventory", "wait", "success"), "Done."]):
        agent = agent_of(script)
        (chain,) = await agent.run(row())
        await agent.manager.close()
        assert chain.reward == 0.0


async def test_the_expert_goes_on_after_other_actions(world: ScienceWorld) -> None:
    await world.reset(Task.of(row("find-plant", 77)))
    await world.scienceworld_step("inventory")
    first = await world.expert()
    assert isinstance(first, ToolCall)
    await world.scienceworld_step(**first.arguments)
    await world.scienceworld_step("look around")
    second = await world.expert()
    assert isinstance(second, ToolCall)
    assert second != first


async def test_valid_actions_are_told_in_short(world: ScienceWorld) -> None:
    await world.reset(Task.of(row()))
    await world.scienceworld_step("teleport to kitchen")
    told = await world.scienceworld_valid_actions()
    assert "move OBJ to OBJ" in told
    assert "thermometer" in told
    assert "pick up thermometer" in (await world.scienceworld_valid_actions("thermometer")).splitlines()
    *some, last = (await world.scienceworld_valid_actions("O")).splitlines()
    assert len(some) == 100
    assert last.endswith("Use a longer word.")
    assert len("\n".join(some)) < 5000
    assert await world.scienceworld_valid_actions("unicorn") == "Nothing can be done with 'unicorn'."
    assert world.steps == 1


async def test_strange_actions_are_answered() -> None:
    strange = ['{"action": 7}', '{"action": ["look"]}', "{}", json.dumps({"action": "go " * 400_000}),
               json.dumps({"action": "loo\u0000k \n\u2028 ∞ 🜁"})]  # fmt: skip
    script = [f'<tool_call>{{"name": "scienceworld_step", "arguments": {each}}}</tool_call>' for each in strange]
    agent = agent_of([*script, called("look around"), "Enough."])
    (chain,) = await agent.run(row(), max_turns=8)
    await agent.manager.close()
    answers = [message.text for message in chain.messages if message.role == "tool"]
    assert len(answers) == 6
    assert answers[3] == answers[4] == "No known action matches that input."
    assert answers[5].startswith("This room is called the")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"task_name": "dance"}, "there is no task 'dance'; there are boil, melt"),
        ({"task_name": 7}, "there is no task 7"),
        ({"variation_idx": 30}, "boil has variations 0 to 29; there is no 30"),
        ({"variation_idx": -1}, "there is no -1"),
        ({"variation_idx": "0"}, "is a whole number, not '0'"),
        ({"simplification": "easier"}, "there is no simplification 'easier'; there are easy"),
        ({"simplification": ["easy"]}, "no simplification"),
        ({"task_name": "power-component", "simplification": "openDoors,noElectricalAction"}, "about electricity"),
        ({"task_name": None}, r"ScienceWorld\.draw_tasks"),
    ],
)
async def test_what_there_is_not_is_named(world: ScienceWorld, wrong: dict[str, object], told: str) -> None:
    with pytest.raises(DataError, match=told):
        await world.reset(Task.of({**row(), **wrong}))
    await world.reset(Task.of(row()))  # and the world is none the worse


async def test_a_closed_world_says_so(world: ScienceWorld) -> None:
    await world.reset(Task.of(row()))
    await world.close()
    await world.close()
    with pytest.raises(EnvironmentFault, match="closed"):
        await world.scienceworld_step("look around")
