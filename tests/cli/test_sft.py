"""`agentfly sft`, run as a command."""

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentfly.agents import HFAgent
from agentfly.cli.app import app
from agentfly.errors import AgentFlyError, ConfigError
from agentfly.models.lookup import draw
from agentfly.tools import calculate
from tests.commands import fork, run_main

torch = pytest.importorskip("torch", reason="a model learns with torch")
torch.set_num_threads(1)

RECIPE = """
import random
from agentfly import reward
from agentfly.agents import HFAgent
from agentfly.environments.lookup import Lookup
from agentfly.models.lookup import draw

@reward
def correct(prediction: str, answer: str) -> float:
    return float(prediction == answer)

def agent(**model):
    return HFAgent(**{"model_name_or_path": MODEL, **model}, tools=[Lookup.lookup], reward=correct)

drawn = random.Random(0)
tasks = [draw(drawn) for _ in range(12)]
"""


@pytest.fixture
def recipe(small_model: Path, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("MODEL", repr(str(small_model))))
    return path


def invoke(*words: object) -> Any:
    result = CliRunner().invoke(app, ["sft", *map(str, words)])
    if isinstance(result.exception, AgentFlyError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def losses(output: str) -> list[float]:
    return [float(line.partition("loss ")[2].partition(",")[0]) for line in output.splitlines() if "held out," in line]


def test_new_model_tokenizer_covers_the_demonstrations(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "new"
    result = invoke(recipe, "--model", "new", "--expert", 12, "--steps", 8, "--learning-rate", 0.003, "--out", out)
    initial_loss, final_loss = losses(result.stdout)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert AutoModelForCausalLM.from_pretrained(out).num_parameters() < 2e6
    assert len(tokenizer.encode("lookup")) == 1
    assert final_loss < initial_loss


def test_sft_on_expert_writes_a_transformers_model(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "learned"
    result = invoke(
        recipe, "--expert", 12, "--steps", 20, "--learning-rate", 0.01, "--validation-fraction", 0.25, "--out", out
    )
    assert result.exit_code == 0
    assert "9 demonstrations to imitate, 3 held out" in result.stdout
    assert "steps: 20 of 20, loss " in result.stdout
    initial_loss, final_loss = losses(result.stdout)
    assert final_loss < initial_loss - 1
    assert f"written to {out}" in result.stdout.replace("\n", "")
    AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    second_result = invoke(
        recipe, "--expert", 4, "--steps", 1, "--validation-fraction", 0.5, "--model", out, "--out", tmp_path / "more"
    )
    assert losses(second_result.stdout)[0] < initial_loss - 1  # it went on from what was learned


def test_model_keeps_the_template_it_was_trained_with(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "warm"
    invoke(recipe, "--model", "new", "--template", "chatml", "--expert", 2, "--steps", 1, "--out", out)
    settings: dict[str, Any] = {"backend": "scripted", "backend_config": {"script": "-"}, "tools": [calculate]}
    saved_template = HFAgent(model_name_or_path=str(out), **settings).template
    named = HFAgent(model_name_or_path=str(out), **settings, template="chatml").template
    assert saved_template is not None
    assert named is not None
    assert saved_template.source == named.source
    assert saved_template.parser is named.parser


def test_intermediate_models_are_written(recipe: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    flags = ("--expert", 6, "--steps", 5, "--save-every", 2, "--prompt-loss-weight", 0.5, "--learning-rate", 0.01)
    assert invoke(recipe, *flags, "--out", tmp_path / "warm").exit_code == 0
    stages = [tmp_path / name for name in ("warm-2", "warm-4", "warm")]
    assert sorted(path for path in tmp_path.glob("warm*")) == sorted(stages)
    weights = [AutoModelForCausalLM.from_pretrained(stage).get_input_embeddings().weight for stage in stages]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    (tmp_path / "warm").rename(tmp_path / "other")
    with pytest.raises(ConfigError, match="warm-2 exists already"):
        invoke(recipe, *flags, "--out", tmp_path / "warm")


def test_interrupted_sft_names_the_last_model_that_was_written(recipe: Path, tmp_path: Path) -> None:
    flags = ["--expert", "6", "--steps", "10000", "--save-every", "2", "--out", "warm"]
    files = [tmp_path / name for name in ("stdin", "stdout", "stderr")]
    files[0].touch()
    with fork(run_main, ["sft", str(recipe), *flags], files, tmp_path) as process:
        while not (tmp_path / "warm-4").exists():
            assert process.is_alive(), files[2].read_text()
            time.sleep(0.01)
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(60)
        assert process.exitcode == 130
    last = max(int(path.name.partition("-")[2]) for path in tmp_path.glob("warm-*"))
    assert files[1].read_text().endswith(f"stopped; the model of step {last} of 10000 is in warm-{last}\n")
    assert files[2].read_text() == ""


def test_sft_on_file(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row, demos = draw(random.Random(1)), tmp_path / "demos.jsonl"
    call = {"id": "a", "function": {"name": "lookup", "arguments": {"who": row["who"], "what": row["relation"]}}}
    talk = [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "name": "lookup", "content": "Fotem"},
        {"role": "assistant", "content": "red"},
    ]
    overlong = [{"role": "user", "content": "red " * 1000}, *talk[1:]]
    demos.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (talk, overlong)))
    result = invoke(recipe, "--demos", demos, "--steps", 2, "--out", tmp_path / "learned")
    assert "1 demonstrations to imitate, 0 held out" in result.stdout
    assert "1 of 2 demonstrations are longer than the 512 positions of the model and are left out" in caplog.text
    assert (tmp_path / "learned" / "model.safetensors").exists()


def test_sft_on_a_saved_dataset(recipe: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    row = {"prompt": "2 + 2?", "completion": " 4"}
    splits = {"train": datasets.Dataset.from_list([row, row]), "test": datasets.Dataset.from_list([row])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    flags = ["--demos", tmp_path / "saved", "--split", "train", "--steps", 1]
    result = invoke(recipe, *flags, "--out", tmp_path / "learned")
    assert "2 demonstrations to imitate, 0 held out" in result.stdout
    with pytest.raises(ConfigError, match="it is not a row of sharegpt"):
        invoke(recipe, *flags, "--format", "sharegpt", "--out", tmp_path / "more")


def test_dropped_demonstrations_are_reported(recipe: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(recipe.read_text() + "tasks[0]['answer'] = 'nothing'\n")
    result = invoke(spoiled, "--expert", 3, "--steps", 1, "--out", tmp_path / "learned")
    assert "1 of 3 demonstrations dropped: 1 × reward 0" in result.stdout
    with pytest.raises(ConfigError, match="none of the expert's 1 chains earned 1: nothing to imitate"):
        invoke(spoiled, "--expert", 1, "--steps", 1, "--out", tmp_path / "more")


def test_bad_arguments_are_rejected(recipe: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    for words, message in (
        ([recipe, "--out", tmp_path / "x"], "give --demos with a file of conversations, or --expert"),
        ([recipe, "--demos", "a.jsonl", "--expert", 2, "--out", tmp_path / "x"], "give --demos with a file"),
        ([recipe, "--demos", "a.jsonl", "--out", tmp_path / "x"], "no file or dataset a.jsonl"),
        ([recipe, "--demos", tmp_path, "--out", tmp_path / "x"], "is a folder that save_to_disk did not write"),
        ([recipe, "--expert", 13, "--out", tmp_path / "x"], "--expert 13, but there are 12 tasks"),
        ([recipe, "--expert", 2, "--out", full], "exists already; give a new or an empty folder"),
        ([recipe, "--expert", 2, "--out", recipe / "x"], "cannot be written: "),  # before anything is trained
        (
            [recipe, "--expert", 2, "--train-tower", "--out", tmp_path / "x"],
            r"--train-tower with the model '.*small.*': it has no vision tower; leave --train-tower out",
        ),
        (
            [recipe, "--expert", 2, "--train-tower", "--model", "new", "--out", tmp_path / "x"],
            "--train-tower with --model new: a new model has no vision tower",
        ),
        (
            [recipe, "--expert", 2, "--validation-fraction", 1, "--out", tmp_path / "x"],
            "is from 0 to below 1",
        ),
        (
            [recipe, "--expert", 2, "--prompt-loss-weight", 2, "--out", tmp_path / "x"],
            "weight is from 0 to 1",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            invoke(*words)
    assert not (tmp_path / "x").exists()
