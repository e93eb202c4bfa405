"""The expert of the recipe, which names animals in random order."""

from __future__ import annotations

import pytest

from agentfly.agents import HFAgent
from agentfly.demonstrations import demonstrate
from agentfly.environments.scienceworld import ScienceWorld, recipe
from agentfly.rewards import scienceworld_score

pytestmark = pytest.mark.usefixtures("shared_java")


def agent_of() -> HFAgent:
    return HFAgent(
        tools=[recipe.RandomSearch], reward=scienceworld_score, template="chatml", backend="scripted",
        backend_config={"script": "-"},
    )  # fmt: skip


async def test_animals_are_named_until_the_task_ends() -> None:
    agent = agent_of()
    tasks = ScienceWorld.draw_tasks("train", 3, tasks=recipe.LIFESPAN)
    shown = await demonstrate(agent, tasks, max_turns=17, threshold=0)
    await agent.manager.close()
    metrics = [chain.score.metrics for chain in shown.accepted]
    assert len(metrics) == 3, shown.reasons
    assert all(each["success"] or each["failed"] for each in metrics)


async def test_other_tasks_have_the_solution_of_the_simulator() -> None:
    agent = agent_of()
    tasks = ScienceWorld.draw_tasks("train", 1, tasks=["find-plant"])
    shown = await demonstrate(agent, tasks, max_turns=25)
    await agent.manager.close()
    assert len(shown.accepted) == 1, shown.reasons


def test_no_held_out_variation_is_trained_on() -> None:
    trained, held_out = (
        {(row["task_name"], row["variation_idx"]) for row in rows} for rows in (recipe.tasks, recipe.eval_tasks)
    )
    assert (len(trained), len(held_out)) == (174, 200)
    assert not trained & held_out


def test_expert_has_an_order_of_its_own_for_each_id() -> None:
    assert len({row["id"] for row in recipe.tasks}) == len(recipe.tasks) == 3 * 174
