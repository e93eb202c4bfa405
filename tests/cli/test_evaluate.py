"""`agentfly eval`, run as a command."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentfly.cli.app import app
from agentfly.errors import AgentFlyError, ConfigError
from tests.backends.openai_server import OpenAIServer, chat, says
from tests.commands import fork, run_command, run_main

RECIPE = """
import asyncio, os
from agentfly import reward
from agentfly.agents import HFAgent

@reward
def right(prediction: str, answer: str) -> float:
    return float(prediction == answer)

async def script(turn):
    await asyncio.sleep(float(os.environ.get("PAUSE", 0)))
    return "4" if turn.random.random() < 0.5 else "5"

def agent(**model):
    settings = {"template": "chatml", "backend": "scripted", "backend_config": {"script": script}, **model}
    return HFAgent(reward=right, **settings)

tasks = [{"question": "1 + 1?", "answer": "2"}]
eval_tasks = [{"question": f"{i} + {4 - i}?", "answer": "4", "level": i % 2} for i in range(4)]
options = {"max_turns": 2}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def invoke(*words: object) -> Any:
    result = CliRunner().invoke(app, ["eval", *map(str, words)])
    if isinstance(result.exception, AgentFlyError):
        raise result.exception
    return result


def test_recipe_eval_tasks(recipe: Path, tmp_path: Path) -> None:
    result = invoke(recipe, "-n", 2, "--greedy", "--by", "level", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout.startswith("evaluating bytes on 4 tasks: at most 2 turns of 1024 tokens\n")
    for word in ("pass@2", "greedy", "level", "95% interval", "4 tasks, 12 chains (4 of them greedy)"):
        assert word in result.stdout
    assert "chains: 12 of 12, reward " in result.stderr
    assert len((tmp_path / "out" / "chains.jsonl").read_text().splitlines()) == 13
    again = invoke(recipe, "-n", 2, "--greedy", "--out", tmp_path / "out", "--json")
    figures = json.loads(again.stdout)
    assert (figures["tasks"], figures["chains"], figures["unscored"]) == (4, 12, 0)  # as in the table
    assert figures == json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert "resuming" in again.stderr


def test_progress_shows_the_reward_of_the_sampled_chains_as_the_table_does(recipe: Path) -> None:
    greedy_is_right = '"4" if turn.chain.endswith("/2") else "5"'  # chains 0 and 1 are sampled
    recipe.write_text(RECIPE.replace('"4" if turn.random.random() < 0.5 else "5"', greedy_is_right))
    result = invoke(recipe, "-n", 2, "--greedy", "--json")
    figures = json.loads(result.stdout)
    assert (figures["reward"][0], figures["greedy"][0]) == (0.0, 1.0)
    assert "chains: 12 of 12, reward 0.000" in result.stderr


def test_data_file_replaces_recipe_tasks(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "held_out.jsonl"
    data.write_text("".join(json.dumps({"question": f"{i}?", "answer": "4"}) + "\n" for i in range(5)))
    figures = json.loads(invoke(recipe, "--data", data, "--row", "1:4", "--json").stdout)
    assert figures["tasks"] == 3
    assert json.loads(invoke(recipe, "--row", "0:2", "--json").stdout)["tasks"] == 2  # of the recipe's own


def test_rows_of_verl_are_evaluated(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "verl.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}?"}], "reward_model": {"ground_truth": "4"}, "topic": "sums"}
        for i in range(5)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.write_text(recipe.read_text().replace("answer", "ground_truth"))
    invoked = invoke(recipe, "--data", data, "--limit", 3, "--rename", "topic=kind", "--by", "kind", "--json")
    figures = json.loads(invoked.stdout)
    assert (figures["tasks"], figures["unscored"]) == (3, 0)
    assert "sums" in invoked.stdout
    with pytest.raises(ConfigError, match="line 1: it is not a row of sharegpt"):
        invoke(recipe, "--data", data, "--format", "sharegpt")
    with pytest.raises(ConfigError, match="--rename topic: write OLD=NEW"):
        invoke(recipe, "--data", data, "--rename", "topic")
    with pytest.raises(ConfigError, match="--limit without a file of tasks to read: give --data"):
        invoke(recipe, "--limit", 3)


NOWHERE = RECIPE.replace('"template": "chatml", "backend": "scripted", "backend_config": {"script": script}, ', "")
"""The same recipe, with a model that only the command line names."""


def test_model_behind_an_api(openai_server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openai_server.answers("/chat/completions", says(chat({"content": "4"})))
    (tmp_path / "api.py").write_text(NOWHERE)
    client = {"backend": "client", "base_url": openai_server.url, "model": "big-one"}
    (tmp_path / "own.py").write_text(NOWHERE.replace("{**model}", f"{{'backend_config': {client}}}"))
    log = ["--out", str(tmp_path / "log.jsonl")]
    assert invoke(tmp_path / "own.py", *log).stdout.startswith(
        "evaluating big-one on 4 tasks: at most 2 turns of 1024 tokens\n"
    )  # not its tokenizer
    (tmp_path / "own.py").write_text((tmp_path / "own.py").read_text().replace("big-one", "small-one"))
    with pytest.raises(ConfigError, match="started with model='big-one', not 'small-one'"):
        invoke(tmp_path / "own.py", *log)
    server = ["--backend", "client", "--base-url", openai_server.url]
    result = invoke(tmp_path / "api.py", *server, "--model", "big-one", "--json")
    figures = json.loads(result.stdout)
    assert (figures["model"], figures["reward"][0]) == ("big-one", 1.0)
    assert result.stderr.startswith("evaluating big-one on 4 tasks: at most 2 turns of 1024 tokens\n")
    assert {body["model"] for body in openai_server.bodies("/chat/completions")} == {"big-one"}
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from agentfly import reward\n@reward\ndef four(prediction: str):\n    return prediction == '4'\n"
    )
    Path("data.jsonl").write_text('{"question": "2 + 2?"}\n')
    bare = invoke("big-one", *server, "--data", "data.jsonl", "--reward", "mine:four", "--json")
    assert json.loads(bare.stdout)["pass_at"]["1"][0] == 1.0


def test_kv_memory_is_passed_to_the_engine_beside_the_settings_of_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from agentfly.training import TrainConfig\n"
        "config = TrainConfig(backend={'backend': 'transformers', 'dtype': 'float32'})\n"
        "def agent(**model):\n    raise SystemExit(repr(model['backend_config']))\n"
        "eval_tasks = ['1 + 1?']\n"
    )
    with pytest.raises(ConfigError, match=r"'dtype': 'float32', 'kv_memory': 2147483648"):
        invoke(recipe, "--kv-memory", "2GiB")
    for size in ("much", "0"):
        assert f"'{size}' is not a size; write 2GiB" in "".join(invoke(recipe, "--kv-memory", size).output.split("\n"))


def test_exit_code_if_nothing_was_scored(tmp_path: Path) -> None:
    (tmp_path / "api.py").write_text(NOWHERE)
    gone = invoke(tmp_path / "api.py", "--backend", "client", "--base-url", "http://127.0.0.1:9/v1", "--model", "m")
    assert gone.exit_code == 1
    assert "http://127.0.0.1:9/v1" in gone.stdout


def test_bad_arguments_are_rejected(recipe: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.py"
    ready.write_text(recipe.read_text() + "agent = agent()\n")
    narrow = tmp_path / "narrow.py"
    narrow.write_text(recipe.read_text().replace("def agent(**model):", "def agent():\n    model = {}"))
    invoke(recipe, "--out", tmp_path / "out.jsonl")
    for words, message in (
        (
            [ready, "--model", "m"],
            r"defines an agent, so model cannot be set from outside; write `def agent",
        ),
        ([narrow, "--model", "m"], r"cannot be called with model_name_or_path .*write `def agent\(\*\*model\)`"),
        ([recipe, "--agent", "react"], "agent cannot be set from outside"),
        ([recipe, "--reward", "right"], "reward cannot be set from outside"),
        ([recipe, "--by", "color"], "no task has such a column; there are answer, level, question"),
        ([recipe, "-n", 3, "--out", tmp_path / "out.jsonl"], "chains=1, not 3"),
        ([recipe, "--out", tmp_path / "out.txt"], "give a folder, or a file whose name ends with .jsonl"),
        (["bytes", "--backend", "client", "--data", tmp_path / "none.jsonl"], "no file"),
        (["nowhere.py"], "there is no recipe"),
    ):
        with pytest.raises(ConfigError, match=message):
            invoke(*words)
    assert invoke(ready).exit_code == invoke(narrow).exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_evaluation_resumes(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "slow.py", tmp_path / "out"
    path.write_text(RECIPE)
    arguments = ["eval", str(path), "-n", "32", "--json", "--max-concurrent", "2"]
    chains = out / "chains.jsonl"
    files = [tmp_path / name for name in ("stdin", "stdout", "stderr")]
    files[0].touch()
    monkeypatch.setenv("PAUSE", "0.1")  # it takes 6.4 s
    with fork(run_main, [*arguments, "--out", str(out)], files, tmp_path) as killed:
        while not chains.exists() or chains.read_bytes().count(b"\n") < 20:
            assert killed.is_alive(), files[2].read_text()
            time.sleep(0.01)
        os.kill(killed.pid or 0, number)
        killed.join(60)
        assert killed.exitcode == (130 if number == signal.SIGINT else -number)
    monkeypatch.delenv("PAUSE")
    done = chains.read_bytes().count(b"\n") - 1
    assert done < 128
    stopped = f"stopped after {done} of 128 chains of 4 tasks; finished chains are in {chains}, and the same command"
    assert (stopped in files[2].read_text()) == (number == signal.SIGINT)
    whole, again = (run_command(*words) for words in (arguments, [*arguments, "--out", out]))
    assert (again.returncode, again.stdout) == (0, whole.stdout)
    assert "chains: 128 of 128" in again.stderr
    assert chains.read_bytes().count(b"\n") == 129


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", 0], "chains must be a whole number"),
        (["--max-concurrent", 0], "max_concurrent_chains must be"),
        (["--max-turns", 0], "max_turns"),
        (["--temperature", -1], "temperature"),
        (["--out", "figures.txt"], "ends with .jsonl"),
    ],
)
def test_bad_flag_is_rejected_before_the_recipe_is_loaded(tmp_path: Path, flags: list[Any], message: str) -> None:
    path, drawn = tmp_path / "recipe.py", tmp_path / "drawn"
    path.write_text(f"open({str(drawn)!r}, 'w').close()\n" + RECIPE)
    with pytest.raises(ConfigError, match=message):
        invoke(path, *flags)
    assert not drawn.exists()
    invoke(path)
    assert drawn.exists()


MISSING = """
import asyncio
from agentfly import Environment, reward
from agentfly.agents import HFAgent
from agentfly.errors import require_extra

class Judge(Environment):
    async def start(self):
        with require_extra("judging", "math"):
            import a_package_that_is_missing

@reward
async def right(prediction: str, judge: Judge) -> float:
    return 1.0

async def script(turn):
    with open("asked", "a") as file:
        file.write(".")
    await asyncio.sleep(0.001)
    return "4"

agent = HFAgent(reward=right, template="chatml", backend="scripted", backend_config={"script": script})
eval_tasks = [{"question": f"{i}?"} for i in range(4)]
"""


def test_missing_extra_stops_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.py").write_text(MISSING)
    with pytest.raises(ConfigError, match=r"a_package_that_is_missing.*pip install 'agentfly-rl\[math\]'"):
        invoke("recipe.py", "-n", 8, "--max-concurrent", 1)
    assert len(Path("asked").read_text()) <= 4  # the first of 32 chains, tried twice, and perhaps the next
