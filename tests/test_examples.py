"""Every file in `examples` runs as its docstring says, in a smaller form."""

import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.commands import run_command

EXAMPLES = Path(__file__).parent.parent / "examples"
RECIPES = ("environment.py", "external_agent.py", "tool_and_reward.py")


def test_every_example_is_tested() -> None:
    tested = {*RECIPES, "grpo_loop.py", "first_ten_minutes.ipynb"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == tested


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_trains(name: str, tmp_path: Path, small_model: Path) -> None:
    fields = [f"model={small_model}", "steps=1", "tasks_per_step=2", "num_chains=2", "evaluation.every=none"]
    run = run_command("train", EXAMPLES / name, "--run", tmp_path / "run", *fields)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "report.html").is_file()


def test_the_environment_keeps_the_contract() -> None:
    check = run_command("env", "check", f"{EXAMPLES / 'environment.py'}:Safe", "--seconds", "20")
    assert check.returncode == 0, check.stdout


def test_the_expert_of_the_environment_is_imitated(tmp_path: Path) -> None:
    options = ["--model", "new", "--expert", "10", "--threshold", "0", "--steps", "2", "--batch-size", "2"]
    run = run_command("sft", EXAMPLES / "environment.py", *options, "--out", tmp_path / "warm")
    assert run.returncode == 0, run.stderr


def test_the_loop_without_a_trainer_trains(small_model: Path) -> None:
    lines = (EXAMPLES / "grpo_loop.py").read_text().splitlines()
    assert len(lines) <= 150
    command = [sys.executable, EXAMPLES / "grpo_loop.py", "--model", small_model, "--steps", "1"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "held-out success" in run.stdout


def test_the_notebook_runs(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells run in a kernel, in order, with a smaller model and one step. The file has no outputs of an old run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(EXAMPLES / "first_ten_minutes.ipynb", as_version=4)
    assert not [cell for cell in notebook.cells if cell.get("outputs")]
    [settings] = [cell for cell in notebook.cells if cell.source.startswith("MODEL = ")]
    settings.source = f"MODEL = {str(small_model)!r}\nSTEPS, TASKS_PER_STEP, HELD_OUT = 1, 2, 2"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    [curve] = [cell for cell in notebook.cells if cell.source.startswith("import matplotlib")]
    assert "image/png" in curve.outputs[-1].data
