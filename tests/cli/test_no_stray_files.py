"""Commands write to the run directory, the cache and the files that the user names, and nowhere else."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from agentfly.cli.app import app
from tests.cli.test_sft import RECIPE as SFT_RECIPE

TESTS = Path(__file__).parents[1]

RECIPE = """
from agentfly import Environment, HFAgent, Task, reward, tool

class Counter(Environment):
    '''A counter.'''

    async def reset(self, task: Task) -> None:
        self.shown = 0

    @tool
    async def press(self, times: int) -> str:
        '''Press the button.

        times: how often.
        '''
        self.shown += times
        return f"The counter shows {self.shown}."

@reward
def reached(env: Counter, target: int) -> float:
    return float(env.shown == target)

script = ['<tool_call>{"name": "press", "arguments": {"times": 7}}</tool_call>', "Done."]

def agent(**model):
    backend = {"template": "chatml", "backend": "scripted", "backend_config": {"script": script}}
    return HFAgent(**{**backend, **model}, tools=[Counter], reward=reached)

tasks = [{"question": "Make it show 7.", "target": 7}]
eval_tasks = tasks
"""

COMMANDS = {
    "run": ["run", "{recipe}", "-n", "2"],
    "train": ["train", "{vowels}", "steps=1", "--run", "{allowed}/run"],
    "eval": ["eval", "{recipe}", "-n", "2", "--out", "{allowed}/eval.jsonl"],
    "report": ["report", "{allowed}/run"],
    "view": ["view", "{allowed}/eval.jsonl", "--export", "{allowed}/page.html"],
    "sft": ["sft", "{sft}", "--expert", "4", "--steps", "1", "--out", "{allowed}/sft"],
    "doctor": ["doctor"],
    "template check": ["template", "check", "{model}"],
    "models": ["models"],
    "models check": ["models", "check", "tiny"],
    "recipes": ["recipes"],
    "recipes copy": ["recipes", "copy", "frozen_lake", "{allowed}/frozen_lake.py"],
    "search build": ["search", "build", "encyclopedia", "--out", "{allowed}/index", "--limit", "50"],
    "search ask": ["search", "ask", "{allowed}/index", "river"],
    "env list": ["env", "list"],
    "env play": ["env", "play", "{recipe}:Counter", "-q", "Make it show 7."],
    "env play ScienceWorld": ["env", "play", "ScienceWorld"],
    "env check": ["env", "check", "FrozenLake", "-n", "2"],
    "env new": ["env", "new", "maze", "--out", "{allowed}/maze"],
}
"""What is typed, by command. A command that takes the output of another one comes after it."""

NOT_RUN = {
    "serve": "runs until it is stopped",
    "gateway": "runs until it is stopped",
    "models prepare": "takes minutes; writes to the cache only",
    "search serve": "runs until it is stopped",
    "env serve": "runs until it is stopped",
    "mcp serve": "runs until it is stopped",
    "mcp tools": "starts another package's server; tests/integrations/mcp runs it",
    "demo": "takes minutes; tests/test_wheel.py runs it",
}

MAY_FAIL = {"models check": "tiny is not prepared"}


def list_commands(command: Any, prefix: str = "") -> list[str]:
    """The commands that can be typed: leaves, and groups that do something by themselves."""
    children = getattr(command, "commands", {})
    names = [prefix] if prefix and (not children or command.invoke_without_command) else []
    return names + [name for key, child in children.items() for name in list_commands(child, f"{prefix} {key}".strip())]


def test_every_command_is_covered() -> None:
    commands = set(list_commands(typer.main.get_command(app)))
    assert commands <= COMMANDS.keys() | NOT_RUN.keys()


PROGRAM = """
import json, sys, traceback
from agentfly.cli.app import main

statuses = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv = ["agentfly", *words]
    try:
        main()
    except SystemExit as end:
        statuses[name] = end.code or 0
    except BaseException:
        traceback.print_exc()
        statuses[name] = 1
print(f"\\n{json.dumps(statuses)}")
"""
"""All commands one after another in one process, which imports torch once; it prints their exit statuses last."""


@pytest.mark.slow_smoke
@pytest.mark.timeout(600)
def test_commands_leave_nothing_outside_their_output_and_the_cache(tmp_path: Path, small_model: Path) -> None:
    folders = {name: tmp_path / name for name in ("work", "home", "cache", "tmp", "runtime", "allowed")}
    for folder in folders.values():
        folder.mkdir()
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    sft = tmp_path / "sft.py"
    sft.write_text(SFT_RECIPE.replace("MODEL", repr(str(small_model))))
    names = {
        "recipe": recipe, "sft": sft, "vowels": TESTS / "training" / "recipe_vowels.py", "model": small_model,
        "allowed": folders["allowed"],
    }  # fmt: skip
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "JAVA_HOME")}
    environment = keep | {
        "HOME": str(folders["home"]),
        "TMPDIR": str(folders["tmp"]),
        "XDG_CACHE_HOME": str(folders["cache"]),
        "XDG_RUNTIME_DIR": str(folders["runtime"]),
        "PYTHONDONTWRITEBYTECODE": "1",  # the recipe's own bytecode is Python's doing
        "VOWELS_MODEL": str(small_model),
    }
    java = shutil.which("java") and importlib.util.find_spec("scienceworld")
    installed = set(list_commands(typer.main.get_command(app)))
    commands = {
        name: [word.format(**names) for word in words]
        for name, words in COMMANDS.items()
        if {" ".join(word for word in words[:2] if word.isalpha()), words[0]} & installed
        and (java or name != "env play ScienceWorld")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folders["work"],
        env=environment,
        input="",
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.rpartition("\n\n")[2])
    assert statuses.keys() == commands.keys()
    failed = [name for name, status in statuses.items() if status and name not in MAY_FAIL]
    assert not failed, done.stdout[-3000:] + done.stderr[-3000:]
    stray = [
        str(path.relative_to(tmp_path))
        for folder in ("work", "home", "tmp", "runtime")
        for path in folders[folder].rglob("*")
        if not path.is_dir()  # torch and matplotlib create empty folders when they are imported
    ]
    assert not stray
