"""`agentfly env new` and `agentfly env check`, run as a person runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentfly.cli import app
from agentfly.commands.beginning import module_name
from agentfly.errors import AgentFlyError, ConfigError
from agentfly.runs import RunDirectory

MODULE = "guessing_game_of_numbers"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [each for each in sys.modules if MODULE in each]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def typed(*words: object) -> str:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output or result.exception
    return result.output


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_written_works(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = typed("env", "new", "GuessingGameOfNumbers")
    folder = Path(MODULE)
    assert f"wrote {folder / MODULE}.py" in said
    assert f"agentfly env check {folder / MODULE}.py" in said
    for width in (88, 120):
        run(sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I,B,UP,SIM,RUF", "--line-length",
            width, "--config", f"src=['{folder}']", folder)  # fmt: skip
        run(sys.executable, "-m", "ruff", "format", "--isolated", "--check", "--line-length", width, folder)
    assert ": 16 properties hold\n" in typed("env", "check", folder / f"{MODULE}.py", "-n", 2)
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) < 200
    typed("train", folder / "recipe.py", f"model={small_model}", "steps=1", "tasks_per_step=1", "num_chains=2",
          "eval_every=null", "--run", "run")  # fmt: skip
    assert RunDirectory("run").records()[-1].step == 1


def test_its_own_tests_pass() -> None:
    typed("env", "new", MODULE, "--out", "there")
    source = str(Path(sys.modules["agentfly"].__file__ or "").parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "there"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_nothing_is_overwritten() -> None:
    Path("there").mkdir()
    Path("there/recipe.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"there/recipe.py is there already; remove it, or name another folder"):
        raise _refused("env", "new", MODULE, "--out", "there")
    assert [each.name for each in Path("there").iterdir()] == ["recipe.py"]
    Path("file").touch()
    assert "cannot be written" in str(_refused("env", "new", MODULE, "--out", "file"))


def _refused(*words: object) -> AgentFlyError:
    error = CliRunner().invoke(app, list(map(str, words))).exception
    assert isinstance(error, AgentFlyError)
    return error


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "no name for a module"),
        ("1st", "no name for a module"),
        ("../up", "no name for a module"),
        ("a b", "no name for a module"),
        ("class", "no name for a module"),
        ("é", "no name for a module"),
        ("x" * 25, "no name for a module"),
        ("a__b", "no name for a module"),
        ("random", "the name of something else already"),
        ("json", "the name of something else already"),
        ("agentfly", "the name of something else already"),
        ("Environment", "the name of something else already"),
        ("recipe", "the name of something else already"),
    ],
)
def test_bad_names_are_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        module_name(name)


def test_a_name_may_be_written_in_any_way() -> None:
    assert {module_name(name) for name in ("tic-tac-toe", "tic_tac_toe", "TicTacToe")} == {"tic_tac_toe"}


BROKEN = '''
from agentfly import Environment, tool


class Broken(Environment):
    @tool
    async def say(self, text: str) -> str:
        """Say something."""
        return text
'''


def test_what_is_broken_is_said_and_the_status_is_one() -> None:
    Path("broken.py").write_text(BROKEN)
    result = CliRunner().invoke(app, ["env", "check", "broken.py"])
    assert result.exit_code == 1
    assert "FAIL  tools documented      say: nothing is said of 'text'" in result.output
    assert "n/a   expert solves" in result.output
    assert "Broken: " in result.output
    Path("tasks.jsonl").write_text('{"question": "a"}\n')
    given = CliRunner().invoke(app, ["env", "check", "broken.py:Broken", "--tasks", "tasks.jsonl", "--seconds", "9"])
    assert "reward bounds         it names no reward" in given.output
