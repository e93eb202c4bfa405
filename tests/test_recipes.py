"""Every recipe is one that `agentfly train` takes, and its expert earns the reward with the recipe's own tools."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentfly.cli.resolve import load_module
from agentfly.cli.run import load_recipe
from agentfly.demonstrations import demonstrate
from agentfly.errors import ConfigError
from agentfly.templates.tokenizer import BYTES
from agentfly.training import TrainConfig

RECIPES = sorted((Path(__file__).resolve().parents[1] / "recipes").glob("*.py"))
TO_TRAIN = [path for path in RECIPES if path.stem != "counter"]  # that one only runs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", TO_TRAIN, ids=lambda path: path.stem)
async def test_its_expert_earns_the_reward(path: Path) -> None:
    try:
        run = load_recipe(path, {"model_name_or_path": BYTES, "template": "chatml"}, without_model=True)
    except ConfigError as missing:
        if "is not installed" not in str(missing):
            raise
        pytest.skip(str(missing))
    module = load_module(path, "recipe")
    assert isinstance(module.config, TrainConfig)
    assert module.config.tasks_per_step <= len(run.tasks)
    assert not _contents(module.tasks) & _contents(module.eval_tasks)
    try:
        shown = await demonstrate(run.agent, run.tasks[:8], threshold=0, max_turns=run.options["max_turns"])
    finally:
        await run.agent.close()
    assert shown.reasons == {}
    earned = [chain.reward or 0.0 for chain in shown.accepted]
    assert sum(earned) >= 0.7 * len(earned), earned  # one that knows no more than the model need not always win


def _contents(rows: list[dict[str, Any]]) -> set[str]:
    return {json.dumps({key: row[key] for key in row if key != "id"}, sort_keys=True) for row in rows}
