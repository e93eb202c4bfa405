"""`agentfly train`: overrides, rejected input, and the message after an interrupt."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentfly.cli.app import app
from agentfly.errors import AgentFlyError
from agentfly.runs import RunDirectory
from agentfly.training import TrainConfig, WarmStart, train
from tests.commands import fork, run_main, run_without_sigint
from tests.training.recipe_vowels import agent, eval_tasks, tasks

DECLARATION = "\nfrom agentfly.training import WarmStart\nwarm_start = WarmStart(expert=9, steps=2)\n"
RECIPE = Path(__file__).parents[1] / "training" / "recipe_vowels.py"


@pytest.fixture(autouse=True)
def environment(small_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VOWELS_MODEL", str(small_model))
    monkeypatch.chdir(tmp_path)


def invoke_error(*words: object) -> str:
    result = CliRunner().invoke(app, ["train", *map(str, words)])
    assert isinstance(result.exception, AgentFlyError)
    return str(result.exception)


def test_run_directories_are_numbered_and_printed() -> None:
    for number in (1, 2):
        result = CliRunner().invoke(app, ["train", str(RECIPE), "steps=1", "evaluation.every=null"])
        assert result.exception is None
        assert "held out before training" in result.output
        assert "greedy" in result.output
        assert "1 steps × 3 tasks × 4 chains; each chain has at most 2 turns of 8 tokens\n" in result.output
        assert "sampling.max_tokens=8" in result.output
        assert "optimizer.learning_rate=0.02" in result.output
        assert "kl.estimator" not in result.output  # the default
        assert f"all fields: runs/recipe_vowels-{number}/config.json" in result.output
        assert "step 1/1" in result.output
        assert f"model: runs/recipe_vowels-{number}/checkpoints/step-000001/model\n" in result.output
        assert f"runs/recipe_vowels-{number}/report.html" in result.output.replace("\n", "")
        assert f"`agentfly view runs/recipe_vowels-{number}`" in result.output
        assert RunDirectory(f"runs/recipe_vowels-{number}").records()[-1].step == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a recipe, or --resume"),
        ([RECIPE, "--resume", "x"], "a run is resumed as it was started"),
        (["--resume", "x", "--run", "y"], "a run is resumed as it was started"),
        ([RECIPE, "max_tokens=9"], "there is no field 'max_tokens'; write sampling.max_tokens"),
        (["nowhere.py"], "there is no recipe 'nowhere.py'"),
        (
            ["sums"],
            "there is no recipe 'sums': no file of this path, and no installed recipe of this name (`agentfly "
            "recipes` lists them). Did you mean sums.py?",
        ),
        (["hunt/hunt_recipe"], "Did you mean hunt/hunt_recipe.py?"),
        (["image_qa"], "ImageQA is an environment without a recipe"),
        (["FrozenLake"], "Did you mean frozen_lake?"),
        (["hunt"], "hunt is a folder: give the file of a recipe, such as hunt/hunt_recipe.py"),
        ([RECIPE, "learning_rat=1"], "close ones: optimizer.learning_rate"),
        ([RECIPE, "fast"], "write field=value"),
        ([RECIPE, "--steps", "2"], "write steps=2"),
        ([RECIPE, "--learning-rate=1e-3"], "write optimizer.learning_rate=1e-3"),
        ([RECIPE, "--from-step", "3"], "--from-step needs --resume"),
        (["--resume", "nowhere"], "there is no run directory "),
        ([RECIPE, "loggers=consol"], "console"),
        ([RECIPE, 'loggers=["consol"]'], "console"),
        ([RECIPE, "backend=vlm"], "vllm"),
        ([RECIPE, "backend=vlm", "model=./nowhere"], "there is no backend 'vlm'"),  # before the model is loaded
        ([RECIPE, "model=./nowhere"], "there is no folder './nowhere' with a model"),
        ([RECIPE, "vision.train_tower=true"], "vision.train_tower=true, but "),
        *(
            (
                [RECIPE, f"model={folder}"],
                f"'{folder}' is not the folder of a model, but contains one: give run/checkpoints/step-000020/model",
            )
            for folder in ("run", "run/checkpoints", "run/checkpoints/step-000020")
        ),
        ([RECIPE, "model=empty"], "the folder 'empty' has no model that transformers can load"),
        ([RECIPE, "model=./adapter"], "is an adapter (lora_rank=…), not a whole model"),
    ],
)
def test_bad_arguments_are_rejected(words: list[object], message: str) -> None:
    for step in ("step-000010", "step-000020"):
        model = Path("run", "checkpoints", step, "model")
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    Path("run", "config.json").write_text("{}")
    Path("hunt").mkdir()
    Path("hunt", "hunt_recipe.py").touch()
    Path("sums.py").touch()
    Path("empty").mkdir()
    Path("adapter").mkdir()
    Path("adapter", "adapter_config.json").write_text("{}")
    assert message in invoke_error(*words)
    assert not list(Path("runs").glob("*"))


def test_recipe_that_needs_a_warm_start_is_refused_unless_a_model_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sft = (
        "    agentfly sft here/mine.py --model=new --expert=9 --steps=2 --batch-size=8 --learning-rate=0.001 --out=warm"
    )
    train = "    agentfly train here/mine.py model=warm"
    recipe = Path("here", "mine.py")
    recipe.parent.mkdir()
    recipe.write_text(RECIPE.read_text() + DECLARATION)
    loaded = "vision.train_tower=true"  # refused when the model is loaded
    assert loaded in invoke_error(recipe, loaded)  # the recipe itself names a folder
    assert loaded in invoke_error(recipe, loaded, f"model={os.environ['VOWELS_MODEL']}")
    monkeypatch.setenv("VOWELS_MODEL", "tiny")
    message = invoke_error(recipe, loaded)
    assert message.startswith("mine needs a warm start: its model 'tiny' is not trained on")
    assert f"Run\n{sft}\n{train}\nor agentfly train here/mine.py --warm-start, which runs both" in message
    assert "give another model with model=; model=tiny trains this one" in message
    assert not list(Path("runs").glob("*"))


def test_warm_start_runs_the_declared_sft_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Path("mine.py")
    recipe.write_text(RECIPE.read_text() + DECLARATION)
    commands: list[list[str]] = []

    def run_sft(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run_sft)
    assert "no field 'nonsense'" in invoke_error(recipe, "--warm-start", "nonsense=1")  # before any SFT
    assert "'warm'" in invoke_error(recipe, "--warm-start")  # the process that writes this model is replaced
    assert commands[0] == WarmStart(expert=9, steps=2).sft_arguments("mine.py")
    assert "give it or model=, not both" in invoke_error(recipe, "--warm-start", "model=tiny")
    assert "declares no `warm_start`" in invoke_error(RECIPE, "--warm-start")
    Path("warm").mkdir()
    assert "train it with model=warm" in invoke_error(recipe, "--warm-start")
    assert len(commands) == 1


def test_recipe_with_a_longer_warmup_runs_as_the_start_of_a_longer_run() -> None:
    recipe = Path("recipe.py")
    recipe.write_text(RECIPE.read_text() + "\nconfig = config.override({'steps': 50, 'optimizer.warmup_steps': 10})\n")
    typed = invoke_error(recipe, "steps=1", "optimizer.warmup_steps=9")
    assert "optimizer.warmup_steps=9 leaves none of steps=1" in typed
    for words in ([recipe, "steps=1", "evaluation.every=null", "--run", "run"], ["--resume", "run", "steps=2"]):
        result = CliRunner().invoke(app, ["train", *map(str, words)])
        assert result.exception is None
    assert "warmup_steps=10 of the recipe is longer than steps=2: the learning rate reaches 20%" in result.output
    assert "there is no field 'stops'; close ones: " in invoke_error("--resume", "run", "stops=9")
    run = RunDirectory("run")
    assert run.config["optimizer"]["warmup_steps"] == 10
    rates = [record.metrics["policy/learning_rate"] for record in run.records()[1:]]
    assert rates == pytest.approx([0.1 * 2e-2, 0.2 * 2e-2])


def test_misspelled_option_gets_the_close_ones() -> None:
    result = CliRunner().invoke(app, ["train", str(RECIPE), "--resum", "x"])
    assert result.exit_code == 2
    assert "--resume" in result.output


def test_folder_to_resume_is_looked_at_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "agentfly.training.trainer", None)  # importing it raises ImportError
    assert "there is no run directory " in invoke_error("--resume", "nowhere")


def test_recipe_without_config_is_rejected(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("tasks = ['a']\n")
    assert "must define `config`" in invoke_error(recipe)


@pytest.mark.parametrize(
    ("target", "number", "status"),
    [(run_main, signal.SIGINT, 130), (run_main, signal.SIGTERM, 143), (run_without_sigint, signal.SIGTERM, 143)],
    ids=["SIGINT", "SIGTERM", "SIGTERM with SIGINT ignored"],
)
def test_interrupted_run_leaves_a_checkpoint_and_a_report(
    target: Callable[..., None], number: signal.Signals, status: int
) -> None:
    folder_name = "here-" + 60 * "x"  # the command that resumes it is longer than a line, and is not broken
    arguments = ["train", str(RECIPE), "steps=1000", "checkpoint.every=1000", "--run", folder_name]
    files = [Path(name).absolute() for name in ("stdin", "stdout", "stderr")]
    files[0].touch()
    with fork(target, arguments, files, Path.cwd()) as process:
        while process.is_alive() and not Path(folder_name, "metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(process.pid or 0, number)
        process.join(60)
        assert process.exitcode == status
    run = RunDirectory(folder_name)
    done = run.records()[-1].step
    assert (
        f"stopped after step {done} of 1000; resume with: agentfly train --resume {folder_name}" in files[1].read_text()
    )
    assert (run.checkpoints / f"step-{done:06}" / "manifest.json").is_file()
    assert run.report.exists()


def test_resume_without_recipe_copy_is_rejected() -> None:
    Path("here").mkdir()
    Path("here/config.json").write_text(json.dumps({"recipe": str(RECIPE), "overrides": {}}))
    assert "the run in here has no recipe.py" in invoke_error("--resume", "here")


async def test_train_inside_a_running_event_loop(small_model: Path) -> None:
    config = TrainConfig(
        model=str(small_model),
        tasks_per_step=1,
        num_chains=2,
        max_turns=1,
        sampling={"max_tokens": 2},
        steps=1,
        loggers=(),
    )
    assert [record.step for record in train(agent, tasks, config, run="here").records()] == [1]


def test_logger_beside_the_recipe_is_named_on_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "vowels.py").write_text(RECIPE.read_text())
    (folder / "logger_beside.py").write_text(
        "class Count:\n"
        "    def __init__(self, directory): self.file = directory.path / 'steps.txt'\n"
        "    def start(self, config): pass\n"
        "    def progress(self, progress): pass\n"
        "    def step(self, record):\n"
        "        with self.file.open('a') as file:\n"
        "            file.write(f'{record.step} ')\n"
        "    def close(self): pass\n"
    )
    arguments = [str(folder / "vowels.py"), "--run", "here", "steps=1", "evaluation.every=null"]
    result = CliRunner().invoke(app, ["train", *arguments, "loggers=logger_beside:Count"])
    assert result.exception is None
    (folder / "vowels.py").write_text("changed")  # the copy in the run directory finds the module, too
    result = CliRunner().invoke(app, ["train", "--resume", "here", "steps=2"])
    assert result.exception is None
    assert Path("here/steps.txt").read_text() == "0 1 2 "


def test_program_on_another_rank_needs_no_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.training.start.launch_or_join_ranks", lambda *_, **__: True)
    run = train(agent, tasks, TrainConfig(), run="on-the-machine-of-rank-0")
    with pytest.raises(AgentFlyError, match="cannot be read"):
        run.config  # noqa: B018


def test_train_and_resume_from_python(small_model: Path) -> None:
    config = TrainConfig(
        model=str(small_model), tasks_per_step=2, num_chains=2, max_turns=2, sampling={"max_tokens": 4},
        optimizer={"learning_rate": 1e-3}, steps=2, loggers=(),
    )  # fmt: skip
    run = train(agent, tasks, config, eval_tasks=eval_tasks, run="here")
    first_records = run.records()
    assert [record.step for record in first_records] == [0, 1, 2]
    again = train(agent, tasks, config, eval_tasks=eval_tasks, run="here", resume=True)
    assert [record.step for record in again.records()] == [0, 1, 2]
    with pytest.raises(AgentFlyError, match=r"was started with optimizer\.learning_rate=0\.001"):
        train(agent, tasks, config.override({"optimizer.learning_rate": 1.0}), run="here", resume=True)


@pytest.mark.parametrize("change", ["learning_rat=1", "steps=many", "sampling.heat=1", "algorithm=nothing", "fast"])
def test_unknown_field_is_rejected_before_the_recipe_is_loaded(tmp_path: Path, change: str) -> None:
    recipe, drawn = tmp_path / "recipe.py", tmp_path / "drawn"
    recipe.write_text(f"open({str(drawn)!r}, 'w').close()\n")
    assert invoke_error(recipe, change)
    assert not drawn.exists()
    assert "must define `config`" in invoke_error(recipe)
    assert drawn.exists()


def test_missing_verl_is_reported_before_the_run_starts(tmp_path: Path) -> None:
    if importlib.util.find_spec("verl"):
        pytest.skip("verl is installed here")
    result = CliRunner().invoke(app, ["train", str(RECIPE), "--on", "verl", "steps=1"])
    assert "pip install 'agentfly-rl[verl]'" in str(result.exception)
    assert result.output == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["train"], ["run"], ["eval"], ["sft", "--out", "model"]])
def test_missing_recipe_is_reported_before_anything_slow_is_imported(command: list[str]) -> None:
    report = (
        "import sys\nfrom agentfly.cli.app import main\n"
        "try:\n    main()\nfinally:\n    print(*sorted({'agentfly.agent', 'numpy', 'torch'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", report, *command, "nope.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "\n")
    assert "there is no recipe 'nope.py'" in done.stderr
