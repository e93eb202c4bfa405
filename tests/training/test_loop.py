"""Whole runs with a real model: every algorithm learns, and a killed run resumes with the same result."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import time
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentfly.agents import HFAgent
from agentfly.cli.recipes import Recipe
from agentfly.cli.train import plan_recipe, resume_run, train_recipe
from agentfly.errors import ConfigError, Fault
from agentfly.runs import Progress, RunDirectory, RunWriter, StepRecord
from agentfly.training.trainer import Trainer
from tests.commands import fork

RECIPE = Path(__file__).with_name("recipe_vowels.py")
NOISE = ("time/", "chain/seconds", "throughput/", "update/seconds", "environments/", "policy/mismatch")
"""What a step took; and the last digit of what the engine computed, which depends on who was in the batch."""


pytestmark = pytest.mark.usefixtures("vowels_model")


@pytest.fixture(scope="module")
def finished_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with all its checkpoints; a test that changes it copies it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOWELS_MODEL", str(small_model))
        return run(tmp_path_factory.mktemp("finished") / "run", "steps=3", "checkpoint.keep=3").path


@pytest.fixture
def copied_run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def run(folder: Path, *changes: str) -> RunDirectory:
    train_recipe(Recipe(RECIPE), ["loggers=[]", *changes], folder)
    return RunDirectory(folder)


def figures(directory: RunDirectory) -> list[dict[str, float]]:
    """What the steps measured, but for noise."""
    return [
        {name: value for name, value in record.flat().items() if not name.startswith(NOISE)}
        for record in directory.records()
    ]


def rewards(directory: RunDirectory) -> list[float]:
    return [record.metrics["reward/mean"] for record in directory.records() if record.metrics]


@pytest.mark.parametrize(
    "algorithm", ["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "gigpo"]
)
def test_every_algorithm_learns(tmp_path: Path, algorithm: str) -> None:
    extra = ["optimizer.critic_learning_rate=0.01"] if algorithm == "ppo" else []
    directory = run(
        tmp_path / "run",
        f"algorithm={algorithm}",
        "steps=15",
        "num_chains=8",
        "evaluation.every=null",
        "checkpoint.every=15",
        *extra,
    )
    seen = rewards(directory)
    assert np.mean(seen[-3:]) > 1.2 * np.mean(seen[:3])
    before, after = [record.eval.reward for record in directory.records() if record.eval is not None]
    assert after > 1.3 * before


@pytest.mark.parametrize(
    "changes",
    [
        ["loss.ratio=segment", "loss.clip=[0.0003,0.0004]", "mini_batches=2", "epochs=2"],
        ["loss.type=cispo", "loss.aggregation=sequence"],
        ["loss.type=plain", "loss.aggregation=constant"],
        ["loss.observation_coef=0.1", "loss.ratio=turn", "epochs=2"],
        ["kl.coef=0.01", "kl.target=0.1", "loss.entropy_coef=0.001"],
        ["kl.coef=0.01", "kl.placement=reward", "kl.estimator=k1"],
        ["loss.correction=geometric-mask", "loss.correction_cap=1.5"],
        ["lora_rank=4", "kl.coef=0.01"],
        [
            "gradient_checkpointing=true",
            "micro_batch_tokens=64",
            "optimizer.schedule=cosine",
            "optimizer.warmup_steps=1",
        ],
        ["zero_variance=resample"],
    ],
    ids=lambda changes: changes[0],
)
def test_every_setting_runs_and_leaves_a_complete_run(tmp_path: Path, changes: list[str]) -> None:
    directory = run(tmp_path / "run", "steps=2", *changes)
    first, last = [record for record in directory.records() if record.metrics]
    assert first.metrics["policy/grad_norm"] != last.metrics["policy/grad_norm"]
    assert np.isfinite([*first.flat().values(), *last.flat().values()]).all()
    assert directory.report.is_file()
    assert directory.curve.is_file()


def test_contents_of_a_run_directory(finished_run: Path, small_model: Path) -> None:
    directory = RunDirectory(finished_run)
    assert directory.config["optimizer"]["learning_rate"] == 2e-2
    records = directory.records()
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert [record.step for record in records if record.eval is not None] == [0, 2, 3]
    stored = directory.trajectories(2)
    assert [record.trajectory.id for record in stored] == [f"{task}/{chain}" for task in range(3) for chain in range(4)]
    for record in stored:
        for segment, advantages in zip(record.trajectory.segments, record.advantages, strict=True):
            assert not advantages[~segment.mask].any()
            assert set(segment.weight_versions[segment.mask]) == {1}
    assert len(directory.trajectories(3, held_out=True)) == 8 * 2  # one sampled and one greedy chain a task
    folder = directory.checkpoints / "step-000003" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    first = AutoModelForCausalLM.from_pretrained(small_model)
    assert tokenizer.chat_template
    assert not torch.equal(model.model.embed_tokens.weight, first.model.embed_tokens.weight)


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    one, two, other = (run(tmp_path / name, "steps=3", f"seed={seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert figures(one) == figures(two)
    assert figures(one) != figures(other)


EVERYTHING = [
    "algorithm=ppo", "kl.coef=0.01", "kl.target=0.05", "mini_batches=2", "epochs=2",
    "optimizer.schedule=linear", "optimizer.warmup_steps=2", "optimizer.critic_warmup_steps=2", "zero_variance=avoid",
]  # fmt: skip


@pytest.mark.slow_smoke
@pytest.mark.parametrize("changes", [EVERYTHING, ["lora_rank=4"]], ids=["ppo and all weights", "grpo and lora"])
def test_killed_run_resumes_bit_for_bit(tmp_path: Path, changes: list[str]) -> None:
    """Kill -9 at random moments, and resume until the run is finished."""
    changes = ["steps=5", "checkpoint.every=2", *changes]
    whole = run(tmp_path / "whole", *changes)
    folder = tmp_path / "killed"
    draw, kills = random.Random(len(changes)), 0
    longest_pause = 0.5  # seconds between a step and the kill
    while not (folder / "report.html").exists():
        if (folder / "config.json").exists() and list((folder / "checkpoints").glob("step-*")):
            begin: tuple[Any, ...] = (resume_run, folder, None)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            begin = (train_recipe, Recipe(RECIPE), ["loggers=[]", *changes], folder)
        with fork(*begin) as process:
            if kills < 2 and _in_training(process, folder):
                time.sleep(draw.random() * longest_pause)
                process.kill()
            process.join(120)
            assert process.exitcode in (0, -signal.SIGKILL)
            kills += process.exitcode == -signal.SIGKILL
        if kills < 2 and (folder / "report.html").exists():  # it finished before the kill: start over, kill earlier
            shutil.rmtree(folder)
            kills, longest_pause = 0, longest_pause / 2
    assert kills == 2
    assert figures(RunDirectory(folder)) == figures(whole)
    weights = [
        sorted((path / "checkpoints" / "step-000005" / "model").glob("*.safetensors"))[0].read_bytes()
        for path in (folder, tmp_path / "whole")
    ]
    assert weights[0] == weights[1]


def _in_training(process: ForkServerProcess, folder: Path) -> bool:
    """Wait until the run has come a step further; False if it ended before."""
    before = _steps(folder)
    while process.is_alive():
        if _steps(folder) > before:
            return True
        time.sleep(0.01)
    return False


def _steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_finished_run_is_not_resumed(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume_run(finished_run, None)
    assert "is finished" in " ".join(capsys.readouterr().out.split())


def test_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    whole = figures(run(tmp_path / "whole", "steps=3", "evaluation.every=null"))
    run(tmp_path / "run", "steps=2", "evaluation.every=null")
    resume_run(tmp_path / "run", None, ["steps=3"])
    directory = RunDirectory(tmp_path / "run")
    assert [line["reward/mean"] for line in figures(directory)[1:]] == [line["reward/mean"] for line in whole[1:]]
    assert (directory.config["steps"], directory.config["overrides"]["steps"]) == (3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.learning_rate=1", "its steps so far were trained with the first value.*may change steps, gpus"),
        ("steps=1", "has completed 3 steps: steps=1 is fewer"),
        ("optimizer.schedule=linear", "was started with optimizer.schedule='constant'"),
    ],
)
def test_resume_refuses_changes_that_are_not_safe(finished_run: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resume_run(finished_run, None, [change])


@pytest.mark.parametrize("phase", ["rollout", "update", "evaluate"])
async def test_cancelled_run_resumes_with_the_same_result(
    finished_run: Path, tmp_path: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel the second step in each phase: a rollout is abandoned, an update finished, an evaluation left out."""
    changes = {"steps": 3, "checkpoint.every": 10, "loggers": ()}
    plan = plan_recipe(Recipe(RECIPE), changes)
    trainer = Trainer.create(plan, tmp_path / "run")
    running = asyncio.create_task(trainer.run())
    reached = trainer._loggers.progress

    def cancel(progress: Progress) -> None:
        reached(progress)
        if trainer.step == 2 and progress.phase == phase:
            asyncio.get_running_loop().call_soon(running.cancel)

    monkeypatch.setattr(trainer._loggers, "progress", cancel)
    with pytest.raises(asyncio.CancelledError):
        await running
    stopped = RunDirectory(tmp_path / "run")
    assert stopped.report.exists()
    assert [record.step for record in stopped.records()] == ([0, 1] if phase == "rollout" else [0, 1, 2])
    await Trainer.resume(plan, tmp_path / "run").run()
    trained = [
        [{name: value for name, value in line.items() if not name.startswith("eval/")} for line in figures(run)]
        for run in (RunDirectory(finished_run), RunDirectory(tmp_path / "run"))
    ]
    assert trained[0] == trained[1]


async def test_run_cancelled_while_a_step_is_logged_has_a_checkpoint_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_recipe(Recipe(RECIPE), {"steps": 5, "checkpoint.every": 10, "evaluation.every": None, "loggers": ()})
    trainer = Trainer.create(plan, tmp_path / "run")
    running = asyncio.create_task(trainer.run())

    def cancel(record: StepRecord) -> None:
        if record.step == 2:
            asyncio.get_running_loop().call_soon(running.cancel)

    monkeypatch.setattr(trainer._loggers, "step", cancel)
    with pytest.raises(asyncio.CancelledError):
        await running
    stopped = RunDirectory(tmp_path / "run")
    assert stopped.records()[-1].step == 2
    assert [path.name for path in stopped.checkpoints.iterdir()] == ["step-000002"]


async def test_run_cancelled_in_a_rollout_keeps_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_recipe(Recipe(RECIPE), {"checkpoint.every": 1, "checkpoint.keep": 1, "loggers": ()})
    trainer = Trainer.create(plan, tmp_path / "run")
    running = asyncio.create_task(trainer.run())
    folders = []

    def cancel(progress: Progress) -> None:
        if trainer.step == 2 and progress.phase == "rollout":
            folders.append(trainer._checkpoints.path(1).stat().st_ino)
            asyncio.get_running_loop().call_soon(running.cancel)

    monkeypatch.setattr(trainer._loggers, "progress", cancel)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert trainer._checkpoints.steps() == [1]
    assert folders == [trainer._checkpoints.path(1).stat().st_ino]  # not removed and written again


def test_unusual_learning_rate_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path / "run", "steps=1", "evaluation.every=null", "optimizer.learning_rate=0.5")
    assert "learning rate 0.5: the model may be destroyed" in caplog.text


def test_more_steps_stretch_a_schedule_that_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = run(tmp_path / "run", "steps=2", "optimizer.schedule=linear", "optimizer.learning_rate=0.4")
    resume_run(directory.path, None, ["steps=4"])
    rates = [record.metrics["policy/learning_rate"] for record in directory.records() if record.step]
    assert rates == pytest.approx([0.4, 0.2, 0.2, 0.1])  # 1 - 0/2, 1 - 1/2, then 1 - 2/4, 1 - 3/4
    assert "optimizer.schedule=linear is stretched from 2 to 4 steps: the learning rate continues at 0.2" in caplog.text


def test_run_can_resume_from_an_earlier_step(finished_run: Path, copied_run: Path) -> None:
    resume_run(copied_run, 1)
    assert figures(RunDirectory(copied_run)) == figures(RunDirectory(finished_run))


def test_resume_that_fails_removes_nothing(copied_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, sharded: bool) -> None:
        raise ConfigError("no memory")

    monkeypatch.setattr("agentfly.training.trainer.build_learner_and_agent", fail)
    before = {path: path.read_bytes() for path in copied_run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError, match="no memory"):
        resume_run(copied_run, 1)
    assert {path: path.read_bytes() for path in before if path.exists()} == before
    RunWriter.open(copied_run).close()  # it is not locked


def test_agent_that_cannot_be_trained_is_closed_with_the_learner(
    vowels_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks end when the learner is closed; else, they would report that the connection is lost."""
    closed = []
    monkeypatch.setattr("agentfly.training.local_learner.LocalLearner.close", lambda _: closed.append("learner"))
    plan = plan_recipe(Recipe(RECIPE), {})
    with pytest.raises(ConfigError, match="this agent has no reward"):
        Trainer.create(replace(plan, make_agent=lambda **model: HFAgent(**model)), tmp_path / "run")
    assert closed == ["learner"]
    assert not (tmp_path / "run").exists()


def test_resumed_run_that_is_killed_again_is_unfinished(copied_run: Path) -> None:
    RunWriter.resume(copied_run, 1).close()
    assert not RunDirectory(copied_run).report.exists()


def test_run_stopped_before_its_first_checkpoint_starts_over(finished_run: Path, copied_run: Path) -> None:
    shutil.rmtree(copied_run / "checkpoints")
    (copied_run / "report.html").unlink()
    resume_run(copied_run, None)
    assert figures(RunDirectory(copied_run)) == figures(RunDirectory(finished_run))


def test_unusable_row_is_reported_before_the_first_step(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        RECIPE.read_text().replace("def vowels(trajectory: Any)", "def vowels(trajectory: Any, answer: str)")
    )
    with pytest.raises(ConfigError, match="asks for 'answer'"):
        train_recipe(Recipe(recipe), ["loggers=[]"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


FAILING_LOGGER = """
class FailsToStart:
    def __init__(self, directory):
        self.folder = directory.path / "notes"

    def start(self, config):
        self.folder.mkdir()
        raise OSError("no server")

    def close(self):
        pass

    progress = step = close
"""


@pytest.mark.parametrize("existing", [False, True])
def test_run_that_fails_at_its_start_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    (tmp_path / "failing_logger.py").write_text(FAILING_LOGGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "run"
    if existing:
        folder.mkdir()
        (folder / "notes.txt").write_text("of the user")
    with pytest.raises(OSError, match="no server"):
        train_recipe(Recipe(RECIPE), ["loggers=failing_logger:FailsToStart"], folder)
    assert [path.name for path in tmp_path.glob("run/*")] == (["notes.txt"] if existing else [])
    assert folder.exists() == existing


def test_resume_that_fails_at_its_start_keeps_the_run(
    copied_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_logger.py").write_text(FAILING_LOGGER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OSError, match="no server"):
        resume_run(copied_run, None, ["loggers=failing_logger:FailsToStart", "steps=4"])
    assert RunDirectory(copied_run).records()


def test_reward_that_always_fails_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.read_text().replace("def vowels(trajectory: Any) -> float:", BROKEN))
    with pytest.raises(Fault, match=r"not one of the 12 chains of step 1 can be trained; most often: reward: .*oops"):
        train_recipe(Recipe(recipe), ["loggers=[]", "steps=2"], tmp_path / "run")


def test_step_without_gradient_counts_in_the_schedule(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.read_text().replace("def vowels(trajectory: Any) -> float:", FIRST_FLAT))
    train_recipe(
        Recipe(recipe),
        ["loggers=[]", "steps=3", "optimizer.schedule=linear", "optimizer.learning_rate=0.3"],
        tmp_path / "run",
    )
    records = [record for record in RunDirectory(tmp_path / "run").records() if record.metrics]
    assert [record.metrics.get("policy/learning_rate") for record in records[1:]] == pytest.approx([0.2, 0.1])


def test_second_run_in_the_same_folder_is_rejected(finished_run: Path) -> None:
    with pytest.raises(ConfigError, match="has a run already"):
        run(finished_run, "steps=1")


def test_a_resume_skips_a_damaged_checkpoint_and_a_stray_folder(
    copied_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (copied_run / "report.html").unlink()
    (copied_run / "checkpoints" / "step-000003" / "trainer.json").write_text("{}")
    stray = copied_run / "checkpoints" / "step-000009"
    stray.mkdir()
    resume_run(copied_run, None)
    assert "step-000003 is not a valid checkpoint" in caplog.text
    assert "step-000009 is not a valid checkpoint" in caplog.text
    assert stray.is_dir()
    assert [record.step for record in RunDirectory(copied_run).records()][-1] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("run_options.context_length=100000", "has 512 positions"),
        ("sampling.max_tokens=513", "has 512 positions"),
        ("model=nowhere", "nowhere"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_rejected(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "run", change)
    assert not (tmp_path / "run").exists()


def test_held_out_task_in_the_training_tasks_is_rejected(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.read_text() + "\neval_tasks = tasks[:2]\n")
    with pytest.raises(ConfigError, match="2 of the held-out tasks are trained on too"):
        plan_recipe(Recipe(recipe), {})


def test_equal_question_with_other_columns_is_another_task(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    rows = (
        "\ntasks, eval_tasks = ([{'question': 'go', 'world': n} for n in range(a, b)] for a, b in ((0, 4), (4, 6)))\n"
    )
    recipe.write_text(RECIPE.read_text() + rows)
    assert [task.columns["world"] for task in plan_recipe(Recipe(recipe), {}).eval_tasks] == [4, 5]


def test_evaluation_takes_the_first_held_out_tasks() -> None:
    plan = plan_recipe(Recipe(RECIPE), {"evaluation.tasks": 2})
    assert list(plan.eval_tasks) == list(plan_recipe(Recipe(RECIPE), {}).eval_tasks)[:2]
    with pytest.raises(ConfigError, match=r"evaluation\.tasks=9, but there are 8 eval_tasks; give fewer"):
        plan_recipe(Recipe(RECIPE), {"evaluation.tasks": 9})


def test_best_step_always_has_a_checkpoint(tmp_path: Path) -> None:
    directory = run(
        tmp_path / "run",
        "steps=5",
        "evaluation.every=1",
        "checkpoint.every=100",
        "checkpoint.keep=1",
        "optimizer.learning_rate=0.3",
    )
    held_out = {record.step: record.eval.reward for record in directory.records() if record.eval is not None}
    best = max(held_out, key=lambda step: (held_out[step], -step))
    kept = {int(path.name[5:]) for path in directory.checkpoints.iterdir()}
    assert kept == {5, best} - {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("segment_reward=last", "every chain is one segment"),
        ("evaluation.chains=3", "there are no eval_tasks"),
        ("evaluation.tasks=3", "there are no eval_tasks"),
    ],
)
def test_settings_without_effect_for_agent_or_tasks_are_rejected(tmp_path: Path, change: str, message: str) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.read_text() + "\neval_tasks = ()\n")
    with pytest.raises(ConfigError, match="would have no effect") as caught:
        train_recipe(Recipe(recipe), ["loggers=[]", "evaluation.every=null", change], tmp_path / "run")
    assert message in str(caught.value)


def test_groups_without_variance_are_skipped_and_counted(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.read_text().replace("def vowels(trajectory: Any) -> float:", FLAT))
    train_recipe(Recipe(recipe), ["loggers=[]", "steps=2"], tmp_path / "run")
    records: list[Any] = [record for record in RunDirectory(tmp_path / "run").records() if record.metrics]
    assert [record.metrics["selection/zero_variance_groups"] for record in records] == [3, 3]
    assert "policy/loss" not in records[0].metrics
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["zero_variance"] is None
    assert stored["memory"]["weights"] > 0


BROKEN = "def vowels(trajectory: Any) -> float:\n    raise ValueError('oops')\n\n\ndef other(trajectory: Any) -> float:"
FIRST_FLAT = """def vowels(trajectory: Any) -> float:
    SEEN.append(trajectory)
    return 1.0 if len(SEEN) <= 12 + 16 else varied(trajectory)


SEEN = []


def varied(trajectory: Any) -> float:"""
FLAT = "def vowels(trajectory: Any) -> float:\n    return 1.0\n\n\ndef other(trajectory: Any) -> float:"
