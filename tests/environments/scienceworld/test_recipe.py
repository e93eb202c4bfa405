"""The expert of the recipe, which names animals in random order."""

from __future__ import annotations

from types import ModuleType

import pytest

from agentfly.agents import HFAgent
from agentfly.environments.scienceworld import ScienceWorld
from agentfly.rewards import scienceworld_score
from agentfly.sft.demonstrations import demonstrate


@pytest.fixture(name="recipe", scope="module")
def recipe_fixture(shared_java: None) -> ModuleType:
    """The recipe, which starts Java when it is imported."""
    from agentfly.environments.scienceworld import recipe

    return recipe


def agent_of(recipe: ModuleType) -> HFAgent:
    return HFAgent(
        tools=[recipe.RandomSearch], reward=scienceworld_score, template="chatml", backend="scripted",
        backend_config={"script": "-"},
    )  # fmt: skip


async def test_animals_are_named_until_the_task_ends(recipe: ModuleType) -> None:
    agent = agent_of(recipe)
    tasks = ScienceWorld.draw_tasks("train", 3, tasks=recipe.LIFESPAN)
    demonstrations = await demonstrate(agent, tasks, max_turns=17, threshold=0)
    await agent.manager.close()
    metrics = [chain.score.metrics for chain in demonstrations.accepted]
    assert len(metrics) == 3, demonstrations.reasons
    assert all(figures["success"] or figures["failed"] for figures in metrics)


async def test_other_tasks_have_the_solution_of_the_simulator(recipe: ModuleType) -> None:
    agent = agent_of(recipe)
    tasks = ScienceWorld.draw_tasks("train", 1, tasks=["find-plant"])
    demonstrations = await demonstrate(agent, tasks, max_turns=25)
    await agent.manager.close()
    assert len(demonstrations.accepted) == 1, demonstrations.reasons


def test_no_held_out_variation_is_trained_on(recipe: ModuleType) -> None:
    trained, held_out = (
        {(row["task_name"], row["variation_idx"]) for row in rows} for rows in (recipe.tasks, recipe.eval_tasks)
    )
    assert (len(trained), len(held_out)) == (174, 200)
    assert not trained & held_out


def test_expert_has_an_order_of_its_own_for_each_id(recipe: ModuleType) -> None:
    assert len({row["id"] for row in recipe.tasks}) == len(recipe.tasks) == 3 * 174
