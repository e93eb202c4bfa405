"""`agentfly env`, run in new processes."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.cli.env_list import resolve_task
from agentfly.cli.env_play import parse_call
from agentfly.cli.resolve import load_module, resolve_environment
from agentfly.environment import Environment
from agentfly.environments import CodeInterpreter
from agentfly.errors import ConfigError
from agentfly.tooling import Toolbox
from tests.commands import run_command
from tests.environments.task_folders.folders import write_task

COMMAND = [sys.executable, "-c", "from agentfly.cli.app import main; main()", "env"]
ENVIRONMENTS = '''
import asyncio
import base64
from agentfly import Environment, Task, tool
from agentfly.environment import Pool
from agentfly.environment import Environment
from agentfly.errors import EnvironmentFault

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADE"
    "lEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


class Counter(Environment):
    """A counter with a button."""

    async def reset(self, task: Task) -> None:
        self.shown, self.goal, self._secret = 0, task.columns.get("goal"), 1

    async def close(self) -> None:
        with open("closed", "a") as file:
            file.write("x")

    @tool
    async def press(self, times: int, how: str = "softly") -> str:
        """Press the button.

        Args:
            times: How often.
        """
        self.shown += times
        return f"Pressed {how}, it shows {self.shown}.\\x1b[31m"

    @tool
    async def say(self, text: str) -> str:
        """Say something."""
        return f"You said {text!r}."

    @tool
    async def look(self) -> dict:
        """Look at it."""
        return {"observation": "It looks so:", "image": PNG}

    @tool
    async def smash(self) -> str:
        """Smash it."""
        raise EnvironmentFault("it is in pieces")

    @tool(ends_chain=True)
    async def leave(self) -> str:
        """Leave."""
        return "Bye."

    @tool
    async def rest(self) -> str:
        """Rest for long."""
        print("resting", flush=True)
        await asyncio.sleep(600)
        return "rested"


class One(Counter):
    pool = Pool(scope="global")


class Broken(Environment):
    async def start(self) -> None:
        raise OSError("no such disk")


class Needy(Counter):
    async def reset(self, task: Task) -> None:
        self.books = task.columns["books"]
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the commands run; the sockets are in a folder with a shorter name."""
    (tmp_path / "worlds.py").write_text(ENVIRONMENTS)
    (tmp_path / "tasks.jsonl").write_text('{"question": "To 3?", "goal": 3}\n{"question": "To 7?", "goal": 7}\n')
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setenv("TMPDIR", runtime)
        yield tmp_path


def env(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return run_command("env", *arguments, typed=typed)


def answers(run: subprocess.CompletedProcess[str], line: str) -> list[str]:
    """What came after a line that was typed, up to the next."""
    assert run.returncode == 0, run.stderr
    answer = run.stdout.partition(f"\n> {line}\n")[2]
    return answer.partition("\n> ")[0].splitlines()


# ── task folders ──


def test_check_solves_each_task_folder_and_names_what_is_wrong(folder: Path) -> None:
    always = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    write_task(folder / "tasks", "good", config="[agent]\nmax_turns = 3\n")
    run = env("check", "tasks")
    if "no sandbox" in run.stdout:
        pytest.skip(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"n/a +good +without effect: agent.max_turns", run.stdout)
    assert re.search(r"pass +good +the expert earns 1, doing nothing 0", run.stdout)

    (folder / "empty").mkdir()
    assert "empty is a folder without task folders (NAME/task.toml)" in env("check", "empty").stderr
    refused = env("check", "tasks", "--seed", "0")
    assert refused.returncode == 2
    assert "--seed has no effect on task folders" in refused.stderr

    write_task(folder / "tasks", "always", tests=always)
    write_task(folder / "tasks", "unsolved", solution="#!/bin/bash\necho No file\nexit 1\n")
    write_task(folder / "tasks", "no-solution", solution=None)
    write_task(folder / "tasks", "no-tests", tests=None)
    write_task(folder / "tasks", "nan", tests=always.replace("1 >", "nan >"))
    run = env("check", "tasks")
    assert run.returncode == 1
    assert re.search(r"FAIL +always +a chain that does nothing earns 1 instead of 0: its tests do not", run.stdout)
    assert re.search(r"FAIL +unsolved +the expert earns 0 instead of 1; its last observation: No file", run.stdout)
    assert re.search(r"FAIL +no-solution +.* has no solution/solve.sh", run.stdout)
    assert re.search(r"FAIL +no-tests +.* has no tests/test.sh, which decides the reward", run.stdout)
    assert re.search(r"FAIL +nan +a chain that does nothing has no reward: .*no valid reward.txt", run.stdout)
    assert re.search(r"pass +good", run.stdout)


def test_check_takes_a_subclass_for_task_folders_and_names_folders_that_are_none(folder: Path) -> None:
    write_task(folder / "tasks", "image", files={"environment/Dockerfile": "FROM scratch\n"})
    write_task(folder / "tasks", "misspelled").joinpath("task.toml").rename(folder / "tasks/misspelled/Task.tml")
    (folder / "local.py").write_text(
        "from agentfly.environments import TaskFolder\nclass Local(TaskFolder):\n    allow_no_image = True\n"
    )
    run = env("check", "local.py:Local", "--tasks", "tasks")
    if "no sandbox" in run.stdout:
        pytest.skip(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"n/a +misspelled +has no task.toml, and is not read as a task", run.stdout)
    assert re.search(r"pass +image +the expert earns 1", run.stdout)

    without_tasks = env("check", "tasks/misspelled").stderr
    assert "tasks/misspelled is a folder without task folders (NAME/task.toml), and no environment" in without_tasks
    assert "there is no folder tasks/nowhere" in env("check", "tasks/nowhere").stderr
    assert "there is no environment 'nowhere'" in env("check", "nowhere").stderr
    assert "There is no folder of that name" in env("check", "nowhere").stderr


def test_play_takes_task_folders(folder: Path) -> None:
    write_task(folder / "tasks", "first")
    run = env("play", "tasks", "--row", "second")
    assert "no task has the id 'second'" in run.stderr


# ── list ──


def test_list_shows_installed_environments_or_one_in_full() -> None:
    listed, one = env("list").stdout, env("list", "code-interpreter").stdout
    assert "CodeInterpreter" in listed
    assert "ModelServer" in listed
    assert "It takes code: string." not in listed
    assert "  code_interpreter  It takes code: string." in one


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CodeInterpretr", "there are .*CodeInterpreter, .* Did you mean CodeInterpreter?"),
        ("worlds.py:Cuonter", "no environment 'Cuonter' in worlds.py; there are Counter, .* Did you mean Counter?"),
        ("worlds.py", "choose an environment of worlds.py; there are Counter, "),
        ("nowhere.py:Counter", "there is no file 'nowhere.py'"),
        ("nowhere:Counter", "the module 'nowhere' cannot be imported"),
        ("json:Counter", "there is no environment 'Counter' in json; there are none"),
        (":Counter", "cannot be imported"),
        ("", "there is no environment '' in the installed packages"),
    ],
)
def test_unknown_name_is_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_environment(name)


def test_names_by_module_and_by_file() -> None:
    assert "A counter with a button." in env("list", "worlds:Counter").stdout
    assert resolve_environment("worlds.py:Counter").__doc__ == "A counter with a button."
    assert resolve_environment("code_interpreter") is resolve_environment("CodeInterpreter") is CodeInterpreter


def test_file_named_like_a_package_does_not_shadow_it(tmp_path: Path) -> None:
    recipe = tmp_path / "colorsys.py"
    recipe.write_text("import colorsys\n\nwhite = colorsys.rgb_to_hsv(1, 1, 1)\n")
    assert load_module(recipe, "recipe").white == (0.0, 0.0, 1)


def test_recipe_that_exits_is_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "leaving.py"
    recipe.write_text("import sys\nsys.exit(0)")
    with pytest.raises(ConfigError, match="SystemExit: 0"):
        load_module(recipe, "recipe")
    assert not (tmp_path / "__pycache__").exists()


# ── play ──


def test_call_syntaxes() -> None:
    lines = [
        "press(times=3)",
        "press 3",
        'press {"times": 3}',
        "press 1 very hard",
        "say 1 + 1 {x}",
        'say {"text": "y"}',
    ]
    run = env("play", "worlds.py:Counter", typed="\n".join(lines))
    printed = [answers(run, line) for line in lines]
    assert printed[:3] == [[f"← Pressed softly, it shows {total}.\ufffd[31m"] for total in (3, 6, 9)]
    assert printed[3] == ["← Pressed very hard, it shows 10.\ufffd[31m"]
    assert printed[4:] == [["← You said '1 + 1 {x}'."], ["← You said 'y'."]]


def test_block_is_one_argument() -> None:
    run = env("play", "worlds.py:Counter", typed="say <<\nif x:\n    y\n>>\npress 2 <<\nhard\n>>\nsay <<\nunfinished")
    assert "← You said 'if x:\\n    y'." in run.stdout
    assert "← Pressed hard, it shows 2." in run.stdout
    assert "← You said 'unfinished'." in run.stdout


def test_invalid_calls_are_answered() -> None:
    run = env("play", "worlds.py:Counter", typed="prss 1\npress often\npress(3)\npress(times=\n(\n:what\n\nlook more")
    assert answers(run, "prss 1") == [
        "✗ Error: there is no tool 'prss'. Tools there are: press, say, look, smash, leave, rest."
    ]
    assert "'times': input should be a valid integer" in answers(run, "press often")[0]
    assert "its arguments must be named" in answers(run, "press(3)")[0]
    assert "it is not Python" in answers(run, "press(times=")[0]
    assert "could not be read" in answers(run, "(")[0]
    assert "there are :tools, :state, :reset and :quit" in answers(run, ":what")[0]
    assert "there is no argument 'arguments'. It takes no arguments." in answers(run, "look more")[0]


def test_state_reset_fault_and_quit() -> None:
    typed = "press 3\n:state\n:reset\nsmash\npress 1\nleave\n:quit\npress 100"
    run = env("play", "worlds.py:Counter", "--task", "tasks.jsonl", "--row", "1", typed=typed)
    assert "Counter: reset for 'To 7?'" in run.stdout
    assert answers(run, ":state") == ["  shown = 3", "  goal = 7"]
    assert "it is in pieces" in answers(run, "smash")[0]
    assert "it shows 1." in answers(run, "press 1")[0]
    assert answers(run, "leave") == ["← Bye.", "the chain would end here; :reset starts a new one"]
    assert "press 100" not in run.stdout
    assert Path("closed").read_text() == "xx"


def test_image_is_saved() -> None:
    run = env("play", "worlds.py:Counter", typed="look")
    first, label, file = answers(run, "look")
    assert first == "← It looks so:"
    assert re.fullmatch(r"\[image (1x1 )?[0-9a-f]{8}\]", label)  # without Pillow, the size is unknown
    saved = Path(file.removeprefix("saved to "))
    assert saved.read_bytes().startswith(b"\x89PNG")
    assert saved.suffix == ".png"
    saved.unlink()


def test_image_of_the_task_is_saved() -> None:
    image = f"data:image/png;base64,{base64.b64encode(bytes(20)).decode()}"
    row = {"question": "To 5?", "image": image, "goal": 5}
    Path("seen.jsonl").write_text(json.dumps(row))
    run = env("play", "worlds.py:Counter", "--task", "seen.jsonl")
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("saved to "))
    saved = Path(line.removeprefix("saved to "))
    assert saved.read_bytes() == bytes(20)
    saved.unlink()


def test_unplayable_environments_are_rejected() -> None:
    unset, toolless = env("play", "worlds.py:Needy"), env("play", "worlds.py:Broken")
    assert (unset.returncode, toolless.returncode) == (2, 2)
    assert "KeyError: 'books'. It was reset for an empty task; use --task FILE --row N" in unset.stderr
    assert "environment Broken has no @tool methods" in toolless.stderr
    assert "Traceback" not in unset.stderr + toolless.stderr


@pytest.mark.parametrize(
    ("question", "data", "row", "message"),
    [
        (None, None, "1", "--row selects a row of the --task file"),
        ("x", "tasks.jsonl", None, "give one"),
        (None, "tasks.jsonl", "0:2", "--row 0:2 selects 2 tasks; select one"),
        (None, "nowhere.jsonl", None, "nowhere.jsonl"),
        ("", None, None, "'question' must be non-empty text"),
    ],
)
def test_bad_task_options_are_rejected(question: str | None, data: str | None, row: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_task(Environment, question, Path(data) if data else None, row)


def test_ctrl_c_cancels_a_call_and_ctrl_d_quits() -> None:
    file, keyboard = pty.openpty()
    screen = Screen(file)
    command = [*COMMAND, "play", "worlds.py:Counter"]
    process = subprocess.Popen(command, stdin=keyboard, stdout=keyboard, stderr=keyboard, start_new_session=True)
    os.close(keyboard)
    try:
        screen.until(b"> ")
        os.write(file, b"press 2\n")
        screen.until(b"it shows 2.")
        os.write(file, b"rest\n")
        screen.until(b"resting")
        process.send_signal(signal.SIGINT)
        assert b"a fresh one was leased" in screen.until(b"was leased")
        os.write(file, b"press 5\n")
        screen.until(b"it shows 5.")
        screen.until(b"> ")  # before that, the terminal would take Ctrl-D for itself
        os.write(file, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(file)
    assert Path("closed").read_text() == "xx"


class Screen:
    """Output of a terminal."""

    def __init__(self, file: int) -> None:
        self._file, self._left = file, b""

    def until(self, expected: bytes) -> bytes:
        """Read up to and including `wanted`; later output is buffered."""
        patience = time.monotonic() + 60
        while expected not in self._left:
            ready, _, _ = select.select([self._file], [], [], max(patience - time.monotonic(), 0))
            assert ready, self._left
            self._left += os.read(self._file, 4096)
        seen, match, self._left = self._left.partition(expected)
        return seen + match


def test_positional_arguments() -> None:
    toolbox = Toolbox([CodeInterpreter])
    assert parse_call("write_file a.txt two words", toolbox).arguments == {"path": "a.txt", "content": "two words"}
    assert parse_call("write_file a.txt", toolbox, "all\n").arguments == {"path": "a.txt", "content": "all\n"}
    assert parse_call("list_files", toolbox).arguments == {}
    assert parse_call("code_interpreter print((1))", toolbox).arguments == {"code": "print((1))"}
    assert parse_call('code_interpreter {"a": 1}["a"]', toolbox).arguments == {"code": '{"a": 1}["a"]'}
    assert parse_call("write_file {bad", toolbox).problem.startswith("its arguments are not JSON")
