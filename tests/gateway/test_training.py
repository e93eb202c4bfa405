"""An agent of the OpenAI Agents SDK learns the lookup task on a CPU."""

from pathlib import Path

import pytest

from agentfly.runs import RunDirectory
from tests.commands import run_command

RECIPE = Path(__file__).with_name("recipe_openai_agents.py")


@pytest.mark.full
@pytest.mark.timeout(900)
def test_an_unchanged_agent_learns(tmp_path: Path) -> None:
    pytest.importorskip("agents", reason="needs openai-agents: make full")
    done = run_command("train", RECIPE, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    rewards = [record.eval.reward for record in RunDirectory(tmp_path / "run").records() if record.eval is not None]
    assert rewards[0] <= 0.3
    assert rewards[-1] >= 0.8
