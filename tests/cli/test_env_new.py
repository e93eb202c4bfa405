"""`agentfly env new` and `agentfly env check`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentfly.cli.app import app
from agentfly.cli.env import module_name
from agentfly.errors import AgentFlyError, ConfigError
from agentfly.runs import RunDirectory

MODULE = "guessing_game_of_numbers"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [module for module in sys.modules if MODULE in module]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == 0, result.output or result.exception
    return result.output


def run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_written_files_work() -> None:
    result = invoke("env", "new", "GuessingGameOfNumbers")
    folder = Path(MODULE)
    assert f"wrote {folder / MODULE}.py" in result
    assert f"wrote {folder / 'pyproject.toml'}" in result
    assert f"agentfly env check {folder / MODULE}.py" in result
    for width in (88, 120):
        run(sys.executable, "-m", "ruff", "check", "--isolated", "--select", "E,F,I,B,UP,SIM,RUF", "--line-length",
            width, "--config", f"src=['{folder}']", folder)  # fmt: skip
        run(sys.executable, "-m", "ruff", "format", "--isolated", "--check", "--line-length", width, folder)
    assert ": 16 properties hold\n" in invoke("env", "check", folder / f"{MODULE}.py", "-n", 2)
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) < 200


def test_printed_commands_train_an_agent_that_calls_its_tool() -> None:
    lines = invoke("env", "new", MODULE).splitlines()
    sft, train = (next(line.split()[1:] for line in lines if f"agentfly {name} " in line) for name in ("sft", "train"))
    invoke(*sft, "--expert", 40, "--steps", 20)
    invoke(
        *train, "steps=1", "tasks_per_step=2", "num_chains=2", "max_turns=1", "evaluation.every=none", "--run", "run"
    )
    metrics = RunDirectory("run").records()[-1].metrics
    assert metrics["calls/chain"] > 0
    assert metrics["calls/unknown_rate"] < 1  # after 20 of 28 steps, some calls name the tool


def test_written_tests_pass() -> None:
    invoke("env", "new", MODULE, "--out", "there")
    source = str(Path(sys.modules["agentfly"].__file__ or "").parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "there"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_existing_files_are_not_overwritten() -> None:
    Path("there").mkdir()
    Path("there/pyproject.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"there/pyproject.toml already exists; remove it, or choose another folder"):
        raise _invoke_error("env", "new", MODULE, "--out", "there")
    assert [path.name for path in Path("there").iterdir()] == ["pyproject.toml"]
    Path(f"there/{MODULE}.py").touch()
    assert "pyproject.toml already exist; remove them" in str(_invoke_error("env", "new", MODULE, "--out", "there"))
    Path("file").touch()
    assert "cannot be written" in str(_invoke_error("env", "new", MODULE, "--out", "file"))


def _invoke_error(*words: object) -> AgentFlyError:
    error = CliRunner().invoke(app, list(map(str, words))).exception
    assert isinstance(error, AgentFlyError)
    return error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "not a module name"),
        ("1st", "not a module name"),
        ("../up", "not a module name"),
        ("a b", "not a module name"),
        ("class", "not a module name"),
        ("é", "not a module name"),
        ("x" * 25, "not a module name"),
        ("a__b", "not a module name"),
        ("random", "already the name of something else"),
        ("json", "already the name of something else"),
        ("agentfly", "already the name of something else"),
        ("Environment", "already the name of something else"),
        ("recipe", "already the name of something else"),
        ("tool-call", "already the name of something else"),
    ],
)
def test_bad_names_are_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module_name(name)


def test_name_styles_give_the_same_module() -> None:
    assert {module_name(name) for name in ("tic-tac-toe", "tic_tac_toe", "TicTacToe")} == {"tic_tac_toe"}


BROKEN = '''
from agentfly import Environment, tool


class Broken(Environment):
    @tool
    async def say(self, text: str) -> str:
        """Say something."""
        return text
'''


def test_failed_check_exits_with_one() -> None:
    Path("broken.py").write_text(BROKEN)
    result = CliRunner().invoke(app, ["env", "check", "broken.py"])
    assert result.exit_code == 1
    assert "FAIL  tools documented      say: the argument 'text' has no description" in result.output
    assert "n/a   expert solves" in result.output
    assert "Broken: " in result.output
    Path("tasks.jsonl").write_text('{"question": "a"}\n')
    result = CliRunner().invoke(app, ["env", "check", "broken.py:Broken", "--tasks", "tasks.jsonl", "--seconds", "9"])
    assert "reward bounds         it names no reward" in result.output
