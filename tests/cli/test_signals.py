"""SIGTERM during a command: environments are closed, and the exit status is 143, as with Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from agentfly.cli.app import main; main()"]
RECIPE = '''
import asyncio, sys
from agentfly import Environment, reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend

async def hang():
    print("hanging", file=sys.stderr, flush=True)
    await asyncio.Event().wait()

class Waiting(Environment):
    """A tool that never returns."""

    async def close(self):
        with open("closed", "a") as file:
            file.write("x")

    @tool(timeout=3600)
    async def hang(self) -> str:
        """Wait."""
        await hang()

    async def expert(self):
        await hang()

class Starting(Waiting):
    """An environment that never starts."""

    async def start(self):
        await hang()

@reward
async def nothing(prediction: str) -> float:
    return 0.0

call = '<tool_call>\\n{"name": "hang", "arguments": {}}\\n</tool_call>'
agent = HFAgent("bytes", tools=[Waiting], template="chatml", backend=ScriptedBackend(call), reward=nothing)
tasks = ["Wait."]
'''


def end_by(number: signal.Signals, words: Sequence[str], typed: str = "", *, ignore_sigint: bool = False) -> int:
    """Start a command, send it a signal once its environment hangs, and return its exit status."""
    Path("recipe.py").write_text(RECIPE)
    command = [*COMMAND, *words]
    if ignore_sigint:  # as a shell without job control does for what it starts in the background
        ignore = (
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
        )
        command = [sys.executable, "-c", ignore, *command]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(typed)
            process.stdin.flush()
            said = []
            for line in process.stderr:
                said.append(line)
                if line == "hanging\n":
                    break
            assert process.poll() is None, "".join(said)
            process.send_signal(number)
            process.stderr.read()
            return process.wait(60)
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["run", "recipe.py"], ""),
        (["eval", "recipe.py"], ""),
        (["sft", "recipe.py", "--out", "model", "--expert", "1"], ""),
        (["env", "play", "recipe.py:Waiting"], "hang()\n"),
        (["env", "check", "recipe.py:Starting", "-n", "1"], ""),
    ],
    ids=["run", "eval", "sft", "play", "check"],
)
def test_sigterm_closes_environments(words: list[str], typed: str) -> None:
    assert end_by(signal.SIGTERM, words, typed) == 143
    assert Path("closed").read_text() == "x"


def test_sigterm_closes_environments_where_sigint_is_ignored() -> None:
    assert end_by(signal.SIGTERM, ["run", "recipe.py"], ignore_sigint=True) == 143
    assert Path("closed").read_text() == "x"


def test_sigint_closes_the_environments_of_a_check() -> None:
    assert end_by(signal.SIGINT, ["env", "check", "recipe.py:Starting", "-n", "1"]) != 0
    assert Path("closed").read_text() == "x"
