"""The command line, run in new processes."""

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from agentfly.cli.live_view import ChainView, LiveView
from agentfly.rollout.events import ChainStarted, TokensSampled
from agentfly.trajectory import Trajectory
from agentfly.types import Task
from tests.commands import run_command
from tests.scaling import grows_at_most

RECIPE = """
from agentfly.agents import HFAgent
from agentfly.tools import calculate

script = ['<tool_call>{"name": "calculate", "arguments": {"expression": "6 * 7"}}</tool_call>', "It is 42."]
agent = HFAgent(tools=[calculate], template="chatml", backend="scripted", backend_config={"script": script})
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def test_help_lists_the_commands() -> None:
    run = run_command("--help")
    assert run.returncode == 0
    assert "run" in run.stdout
    assert "template" in run.stdout


def test_run_recipe_on_question_and_save(recipe: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chains.jsonl"
    run = run_command("run", recipe, "-q", "What is 6 times 7?", "-n", "2", "--save", saved)
    assert run.returncode == 0, run.stderr
    options, *_ = run.stdout.splitlines()
    assert options == "1 task × 2 chains; each chain has at most 10 turns of 1024 tokens at temperature 1"
    assert '→ calculate(expression="6 * 7")' in run.stdout
    assert "← 42" in run.stdout
    trajectories = [Trajectory.from_json(json.loads(line)) for line in saved.read_text().splitlines()]
    assert [t.prediction for t in trajectories] == ["It is 42.", "It is 42."]
    assert [t.chain for t in trajectories] == [0, 1]


def test_single_chain_prints_tokens(recipe: Path) -> None:
    run = run_command("run", recipe, "-q", "What is 6 times 7?")
    assert "<|im_start|>assistant\n<tool_call>" in run.stdout


def test_dataset_rows(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"Question {i}?"}) + "\n" for i in range(5)))
    run = run_command("run", recipe, "--data", data, "--row", "1:3")
    assert run.returncode == 0, run.stderr
    assert "Question 1?" in run.stdout
    assert "Question 2?" in run.stdout
    assert "Question 3?" not in run.stdout


def test_question_names_a_column_of_the_data(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"problem": "What is 6 times 7?", "question": "other"}) + "\n")
    run = run_command("run", recipe, "--data", data, "--question", "problem")
    assert "What is 6 times 7?" in run.stdout
    run = run_command("run", recipe, "--data", data, "-q", "task")
    assert "no column 'task' to take the question from; the row has 'problem', 'question'" in run.stderr


def test_demo_recipe_shows_successes_and_failures() -> None:
    run = run_command("run", "counter")
    assert run.returncode == 0, run.stderr
    assert "■ answer, reward 1" in run.stdout
    assert "■ answer, reward 0" in run.stdout
    assert "✗ Error: there is no tool 'look'. Tools there are: calculate, press." in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "give a recipe file, or --model"),
        (["run", "nowhere.py"], "there is no recipe 'nowhere.py'"),
        (["run", "--model", "bytes", "--agent", "hff"], "there is no agent 'hff'; there are hf, react, code, action"),
        (["run", "--model", "bytes", "--tool", "calculat"], "no tool is named 'calculat'"),
        (["run", "--model", "bytes", "--tool", "nowhere:tool"], "cannot be imported"),
        (["run", "--model", "bytes", "--backend", "clent", "-q", "x"], "there is no backend 'clent'"),
        (["run", "--model", "/no/model", "--backend", "client", "--template", "qwen2.5", "-q", "x"], "no tokenizer"),
        (["template", "check", "/no/model"], "no tokenizer for '/no/model'"),
    ],
)
def test_user_errors_print_no_traceback(arguments: list[str], message: str) -> None:
    run = run_command(*arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_recipe_without_agent_or_tasks_is_rejected(recipe: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("x = 1")
    assert "must define `agent`" in run_command("run", empty, "-q", "x").stderr
    assert "there is nothing to run" in run_command("run", recipe).stderr
    assert "cannot be set from outside" in run_command("run", recipe, "--model", "m", "-q", "x").stderr
    assert (
        "--format, --rename without a file of tasks"
        in run_command("run", recipe, "-q", "x", "--format", "verl", "--rename", "a=b").stderr
    )


def test_unknown_subcommand_is_answered_with_those_that_exist() -> None:
    run = run_command("recipes", "frozen_lake")
    assert (run.returncode, run.stdout) == (2, "")
    assert "agentfly: recipes has no command 'frozen_lake'; there are: copy." in run.stderr


def test_failed_reward_is_named_below_the_table(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("tools=", "reward=lambda prediction: 1 / 0, tools="))
    run = run_command("run", recipe, "-q", "x", "-n", "2")
    assert "failed: ZeroDivisionError: division by zero" in run.stdout.splitlines()[-1]
    assert run.stdout.splitlines()[-1].startswith("2 × reward")


def test_unreachable_server_is_reported_with_its_address() -> None:
    run = run_command("run", "--model", "m", "--backend", "client", "--base-url", "http://127.0.0.1:9/v1", "-q", "x")
    assert "http://127.0.0.1:9/v1" in run.stdout
    assert "Traceback" not in run.stderr


def test_template_check_reports_properties() -> None:
    run = run_command("template", "check", "bytes", "--template", "chatml")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "chatml" in run.stdout


def test_save_path_is_checked_before_the_run(recipe: Path, tmp_path: Path) -> None:
    missing = run_command("run", recipe, "-q", "x", "--save", tmp_path / "no" / "chains.jsonl")
    folder = run_command("run", recipe, "-q", "x", "--save", tmp_path)
    full = run_command("run", recipe, "-q", "x", "--save", "/dev/full")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "there is no folder" in missing.stderr
    assert "is a folder; name a file in it" in folder.stderr
    assert "cannot be written: No space left on device" in full.stderr


def test_recipe_errors_show_a_traceback_from_the_recipe_on(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("import nowhere_to_be_found")
    (tmp_path / "syntax.py").write_text("x = = 1")
    (tmp_path / "late.py").write_text("def agent():\n    return 1 / 0\n")
    (tmp_path / "options.py").write_text(RECIPE + "options = [1]")
    runs = {name: run_command("run", f"{name}.py", "-q", "x", cwd=tmp_path) for name in ("wrong", "syntax", "late")}
    assert all(run.returncode == 2 and run.stderr.startswith("agentfly: ") for run in runs.values())
    assert not any("running.py" in run.stderr for run in runs.values())
    assert 'wrong.py", line 1' in runs["wrong"].stderr
    assert "nowhere_to_be_found" in runs["wrong"].stderr
    assert 'syntax.py", line 1' in runs["syntax"].stderr
    assert "ZeroDivisionError: division by zero" in runs["late"].stderr
    assert "it must be a dict" in run_command("run", "options.py", "-q", "x", cwd=tmp_path).stderr


def test_flag_without_effect_is_rejected(recipe: Path) -> None:
    assert "agent cannot be set from outside" in run_command("run", recipe, "-q", "x", "--agent", "react").stderr
    assert "there is nothing to run" in run_command("run", recipe, "--row", "0").stderr
    assert "cannot be imported" in run_command("run", "--model", "bytes", "--tool", ":x", "-q", "x").stderr


def test_question_is_utf8_in_any_locale(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    saved = tmp_path / "chains.jsonl"
    command = [sys.executable, "-m", "agentfly.cli", "run", recipe, "-q", "Où ?", "--save", saved]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert Trajectory.from_json(json.loads(saved.read_bytes())).task.question == "Où ?"


def test_control_characters_are_sanitized(tmp_path: Path) -> None:
    path = tmp_path / "rude.py"
    path.write_text(RECIPE.replace("It is 42.", "\\x1b[2J\\x1b]0;owned\\x9b31m"))
    run = run_command("run", path, "-q", "x\x1b[31m", "--tokens")
    assert run.returncode == 0, run.stderr
    assert not {"\x1b", "\x9b"} & set(run.stdout)
    assert "[2J" in run.stdout


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("from agentfly.errors import ConfigError; raise ConfigError(EVIL)", 2),
        ("raise ValueError(EVIL)", 2),
        ("import logging; logging.getLogger('x').warning('%s', EVIL); raise ValueError", 2),
        ("raise Unexpected(EVIL)", 1),
    ],
    ids=["our error", "error in the recipe", "log record", "traceback"],
)
def test_error_lines_carry_no_control_characters(tmp_path: Path, body: str, status: int) -> None:
    path = tmp_path / "rude.py"
    evil = "EVIL = '\\x1b[2J\\x1b]0;owned\\x9b31m'\nclass Unexpected(BaseException): pass\n"
    path.write_text(evil + body)
    run = run_command("run", path, "-q", "x")
    assert run.returncode == status, run.stderr
    assert not {"\x1b", "\x9b"} & set(run.stderr)
    assert "[2J" in run.stderr


def test_failed_reward_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "unrewarded.py"
    path.write_text(
        f"from agentfly import reward\n@reward\ndef forgot(prediction): ...\n{RECIPE}".replace(
            "tools=[calculate]", "tools=[calculate], reward=forgot"
        )
    )
    assert "■ answer: reward 'forgot' returned None" in run_command("run", path, "-q", "x").stdout


def test_recipe_observer_is_called(tmp_path: Path) -> None:
    path = tmp_path / "watched.py"
    path.write_text(RECIPE + "options = {'observer': lambda event: print('saw', type(event).__name__)}")
    run = run_command("run", path, "-q", "x")
    assert "saw ChainStarted" in run.stdout
    assert "■ answer" in run.stdout


def test_python_dash_m() -> None:
    run = subprocess.run([sys.executable, "-m", "agentfly.cli", "--help"], capture_output=True, text=True)
    assert "Usage" in run.stdout


@pytest.mark.parametrize("chains", [1, 3])
def test_live_panels_leave_room_for_the_echo_of_ctrl_c(chains: int) -> None:
    output = io.StringIO()
    console = Console(file=output, width=100, height=40, force_terminal=True, color_system=None, _environ={})
    with LiveView(console) as view:
        for chain in range(chains):
            view(ChainStarted(0, chain, Task.of("What is it?")))
    lines = [re.sub(r"\x1b\[[?\w;]*", "", line).strip("\r") for line in output.getvalue().split("\n")]
    assert 90 <= max(map(len, lines)) <= 98


def test_dumb_terminal_gets_lines() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, _environ={"TERM": "dumb"})
    with LiveView(console) as view:
        view(ChainStarted(0, 0, Task.of("What is it?")))
    assert "What is it?" in output.getvalue()


@pytest.mark.parametrize("text", ["\n", "a ", "\n\n\n\nword "])
def test_panel_wraps_only_the_end_of_a_long_reply(text: str) -> None:
    def cpu_seconds(size: int) -> float:
        view = ChainView("0/0")
        view.handle(TokensSampled(0, 0, 0, (), text * (size // len(text)) + "the end"))
        started = time.process_time()
        panel = view.panel(width=60, height=12)
        seconds = time.process_time() - started
        assert "the end" in str(panel.renderable)
        return seconds

    assert grows_at_most(cpu_seconds, 10_000, 200_000, ratio=3)


@pytest.mark.integration
@pytest.mark.parametrize("arguments", [["--version"], ["models"], ["train", "--help-fields"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "agentfly", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2
    assert result.stderr == "agentfly: the output could not be written: No space left on device\n"


def test_version() -> None:
    assert run_command("--version").stdout.startswith("agentfly 0.")


def test_exit_code_if_all_chains_failed(recipe: Path) -> None:
    arguments = ["run", "--model", "m", "--backend", "client", "--base-url", "http://127.0.0.1:9/v1", "-q", "x"]
    assert run_command(*arguments).returncode == 1
    assert run_command("run", recipe, "-q", "x").returncode == 0
