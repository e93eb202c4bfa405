"""`agentfly doctor` reports which sandboxes work, what each does not limit, package conflicts, and memory plans."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentfly.cli.app import app
from agentfly.errors import ConfigError


def test_unenforced_limits_are_listed() -> None:
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "not limited" in result.output
    rows = {line.split("│")[1].strip(): line for line in result.output.splitlines() if line.startswith("│")}
    assert "disk, inodes" in rows["unsafe"]
    for strong in ("zygote", "namespaces"):
        assert "disk" not in rows[strong]
    if "works" not in rows["landlock"]:
        pytest.skip(f"landlock does not work here: {rows['landlock']}")
    assert "disk, inodes" in rows["landlock"]


def test_unrelated_distribution_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"agentfly": "0.7.2"}[name])
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "The distribution `agentfly` 0.7.2 is installed." in result.output


def test_memory_plan_needs_no_gpu(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the plan counts the weights of a model: pip install 'agentfly-rl[train]'")
    from transformers import Qwen2Config

    Qwen2Config().save_pretrained(tmp_path)  # the shape of a model of 12B, without weights
    plan = ["doctor", "--memory", str(tmp_path), "--device-gib"]
    runner = CliRunner(env={"COLUMNS": "250"})
    result = runner.invoke(app, [*plan, "80"])
    assert result.exit_code == 1, result.output
    assert "engine weights" in result.output
    assert "lora_rank=16 gradient_checkpointing=true micro_batch_tokens=4096" in result.output
    fits = runner.invoke(app, [*plan, "80", "lora_rank=16", "gradient_checkpointing=true", "micro_batch_tokens=4096"])
    assert fits.exit_code == 0, fits.output
    assert "left" in fits.output
    hopeless = runner.invoke(app, [*plan, "4"])
    assert hopeless.exit_code == 1, hopeless.output
    assert "take a smaller model or a larger device" in hopeless.output


def test_missing_verl_is_reported() -> None:
    if importlib.util.find_spec("verl"):
        pytest.skip("verl is installed here")
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["doctor", "--on", "verl"])
    assert result.exit_code == 1
    assert "FAILS versions: verl is not installed: pip install 'agentfly-rl[verl]'" in result.output


def test_unknown_system_is_rejected() -> None:
    result = CliRunner().invoke(app, ["doctor", "--on", "nothing"])
    assert isinstance(result.exception, ConfigError)
    assert "write --on verl" in str(result.exception)


def test_memory_options_without_a_model_are_rejected() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device-gib", "80"])
    assert isinstance(result.exception, ConfigError)
    assert "--memory" in str(result.exception)


RECIPE = Path(__file__).parents[1] / "training" / "recipe_vowels.py"


def check_recipe(*words: object) -> dict[str, str]:
    """The marks and findings of `agentfly doctor RECIPE`, by check."""
    result = CliRunner().invoke(app, ["doctor", *map(str, words)])
    lines = re.findall(r"^(ok|FAILS) +([\w -]+): (.*(?:\n +.*)*)", result.output, re.MULTILINE)
    assert result.exit_code == int("FAILS" in result.output), result.output
    return {check: f"{mark} {finding}" for mark, check, finding in lines}


def test_recipe_is_checked_up_to_a_scored_chain(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOWELS_MODEL", str(small_model))
    checks = check_recipe(RECIPE, "sampling.max_tokens=4")
    assert list(checks) == [
        "sandbox", "packages", "recipe", "model", "GPU", "memory", "template", "parser", "environments", "weight sync",
        "reward", "mask", "log-probabilities",
    ]  # fmt: skip
    assert all(checks[name].startswith("ok ") for name in list(checks)[1:]), checks
    assert checks["recipe"].startswith("ok 40 tasks, 8 held out")
    assert checks["reward"].endswith("for a chain of at most 2 turns of 16 tokens")


def test_reward_that_raises_fails_the_check(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOWELS_MODEL", str(small_model))
    recipe = tmp_path / "recipe.py"
    broken = "from agentfly import reward\n@reward\ndef broken(prediction: str) -> float:\n    return 1 / 0\n"
    text = RECIPE.read_text().replace("reward=vowels", "reward=broken")
    recipe.write_text(text.replace("def agent(", f"{broken}\n\ndef agent("))
    checks = check_recipe(recipe)
    assert checks["reward"].startswith("FAILS ")
    assert "ZeroDivisionError" in checks["reward"]
    assert "`agentfly run RECIPE --row 0 --tokens` shows the chain" in checks["reward"]
    assert "log-probabilities" in checks


def test_failed_check_has_advice_and_exit_status_1(tmp_path: Path, small_model: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("import no_such_package\n")
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["doctor", str(recipe)])
    assert result.exit_code == 1
    assert "No module named 'no_such_package'" in result.output
    assert "install what it needs" in result.output
    other = CliRunner().invoke(app, ["doctor", str(recipe), "--on", "verl"])
    assert isinstance(other.exception, ConfigError)
