"""Every installed recipe can be trained, and its expert earns the reward with the recipe's own tools."""

import json
import re
import sys
from typing import Any

import pytest

from agentfly import plugins
from agentfly.cli.recipes import find_recipe, list_requirements
from agentfly.cli.run import load_recipe
from agentfly.cli.train import plan_recipe
from agentfly.errors import ConfigError
from agentfly.sft.demonstrations import demonstrate
from agentfly.templates.tokenizer import BYTES
from agentfly.training import TrainConfig

MIN_SUCCESS = dict.fromkeys(
    ("frozen_lake", "math_suboptimal", "scienceworld", "sokoban", "textarena", "visual_gymnasium"), 0.2
)
"""Smallest mean reward of the expert's chains where it is below the usual 0.7."""
TO_TRAIN = [plugin.name for plugin in plugins.list_plugins(plugins.RECIPES) if plugin.name != "counter"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TO_TRAIN)
async def test_its_expert_earns_the_reward(name: str) -> None:
    recipe = find_recipe(name)
    try:
        run = load_recipe(recipe, {"model_name_or_path": BYTES, "template": "chatml"}, without_model=True)
    except ConfigError as missing:
        if "is not installed" not in str(missing):
            raise
        pytest.skip(str(missing))
    module = sys.modules[f"recipe_{name}"]
    assert isinstance(module.config, TrainConfig)
    assert module.config.tasks_per_step <= len(run.tasks)
    assert not _contents(module.tasks) & _contents(module.eval_tasks)
    try:
        demonstrations = await demonstrate(run.agent, run.tasks[:8], threshold=0, max_turns=run.options["max_turns"])
    finally:
        await run.agent.close()
    assert demonstrations.reasons == {}
    earned = [chain.reward or 0.0 for chain in demonstrations.accepted]
    # An expert that knows no more than the model need not always win.
    assert sum(earned) >= MIN_SUCCESS.get(name, 0.7) * len(earned), earned


@pytest.mark.parametrize("name", TO_TRAIN)
def test_recipe_that_needs_a_warm_start_has_its_commands(name: str) -> None:
    recipe = find_recipe(name)
    assert list_requirements(recipe.path)[0].startswith("agentfly-rl[train")
    try:
        plan = plan_recipe(recipe, {})
    except ConfigError as error:
        pytest.skip(str(error))
    explained = recipe.explain_warm_start(plan.warm_start, "tiny")
    if name in ("find_digit", "lookup", "openenv", "rooms", "verifiers"):  # their models are pretrained on such tasks
        assert explained == ""
    else:
        sft, train = re.findall(r"^    agentfly (?:.*\\\n)*.*", explained, re.MULTILINE)
        assert sft.startswith(f"    agentfly sft {name} --")
        assert sft.endswith(" --out=warm")
        assert train.startswith(f"    agentfly train {name} model=warm")


def _contents(rows: list[dict[str, Any]]) -> set[str]:
    return {json.dumps({key: row[key] for key in row if key != "id"}, sort_keys=True) for row in rows}
