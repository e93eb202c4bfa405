"""Signals during a command: environments are closed, a line says what is kept, and the exit status is 128 + number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.commands import fork, run_main, run_without_sigint

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


def end_by(
    number: signal.Signals, words: Sequence[str], typed: str = "", target: Callable[..., None] = run_main
) -> int | None:
    """Start a command, send it a signal once its environment hangs, and return its exit status."""
    Path("recipe.py").write_text(RECIPE)
    files = [Path(name).absolute() for name in ("stdin", "stdout", "stderr")]
    files[0].write_text(typed)
    files[2].touch()
    with fork(target, [*words], files, Path.cwd()) as process:
        while "hanging\n" not in (printed := files[2].read_text()):
            assert process.is_alive(), printed
            time.sleep(0.01)
        os.kill(process.pid or 0, number)
        process.join(60)
        return process.exitcode


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SIGNALLED_TWICE = """
import asyncio, os, signal
from agentfly.cli.signals import handle_sigterm

async def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        print("closed")

with handle_sigterm():
    asyncio.run(main())
"""


def test_sigterm_that_is_repeated_at_once_does_not_interrupt_the_closing() -> None:
    """`timeout` sends it to the process and then to its group."""
    ended = subprocess.run([sys.executable, "-c", SIGNALLED_TWICE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (143, "closed\n"), ended.stderr


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
    assert end_by(signal.SIGTERM, ["run", "recipe.py"], target=run_without_sigint) == 143
    assert Path("closed").read_text() == "x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "recipe.py"], "agentfly run: stopped\n"),
        (["eval", "recipe.py"], "stopped after 0 of 1 chains of 1 tasks; nothing is kept: --out FOLDER stores"),
        (["sft", "recipe.py", "--out", "model", "--expert", "1"], "stopped; no model was written"),
    ],
    ids=["run", "eval", "sft"],
)
def test_sigint_says_what_is_kept(words: list[str], message: str) -> None:
    assert end_by(signal.SIGINT, words) == 130
    printed = Path("stdout").read_text() + Path("stderr").read_text()
    assert message in printed
    assert "Traceback" not in printed
    assert Path("closed").read_text() == "x"


def test_sigint_closes_the_environments_of_a_check() -> None:
    assert end_by(signal.SIGINT, ["env", "check", "recipe.py:Starting", "-n", "1"]) != 0
    assert Path("closed").read_text() == "x"
