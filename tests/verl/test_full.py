"""Training on verl, longer tests: resume after a kill, asynchronous rollout on the same and on other nodes, a critic,
environments that all workers share, the death of the trainer, of a rank, of the balancer and of a node, and an error
that no restart repairs."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from agentfly.integrations.verl.config import list_checkpoints
from tests.verl.conftest import RECIPE, Train, cluster_environment, read_metrics

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


def prepare(folder: Path, **deaths: int) -> str:
    """A copy of the recipe with the deaths to happen."""
    (folder / "deaths").mkdir()
    for victim, number in deaths.items():
        (folder / "deaths" / victim).write_text(str(number))
    return str(shutil.copy(RECIPE, folder / "recipe.py"))


def test_resume_after_a_kill_gives_equal_figures(train: Train, ray_address: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "steps=3")
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "agentfly.cli", "train", str(RECIPE), "--run", str(folder), "--on", "verl"]
    command += ["nodes=2", "gpus=1", "workers=1", "steps=3"]
    driver = subprocess.Popen(command, env=cluster_environment(ray_address), stdout=subprocess.DEVNULL)
    while driver.poll() is None and not list_checkpoints(folder / "checkpoints"):
        time.sleep(0.1)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    resumed = train(folder)
    assert [record["step"] for record in read_metrics(resumed)] == [1, 2, 3]
    for one, other in zip(read_metrics(whole), read_metrics(resumed), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name.startswith("policy/mismatch"):  # depends on which requests shared a batch
                continue
            assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (one["step"], name)


def test_asynchronous_rollout(train: Train, tmp_path: Path) -> None:
    stale = ["async_training.max_staleness=1", "async_training.on_stale=drop", "loss.correction=token-truncate"]
    run = train(tmp_path / "run", "steps=4", "restarts=0", *stale)
    metrics = read_metrics(run)
    assert [record["step"] for record in metrics] == [1, 2, 3, 4]
    assert all(0 <= record["policy/staleness_max"] <= 1 for record in metrics)
    assert any(record["policy/staleness_max"] == 1 for record in metrics)
    assert all("policy/correction_weight" in record for record in metrics)


def test_rollout_on_a_node_of_its_own(train: Train, tmp_path: Path) -> None:
    stale = ["async_training.max_staleness=1", "async_training.on_stale=drop", "loss.correction=token-truncate"]
    run = train(tmp_path / "run", "steps=4", "restarts=0", "nodes=1", "rollout_nodes=1", *stale)
    metrics = read_metrics(run)
    assert [record["step"] for record in metrics] == [1, 2, 3, 4]
    staleness = [record["policy/staleness_max"] for record in metrics]
    assert max(staleness) == 1  # the server sampled while the other node trained, and got new weights
    # Against the weights it has, the server's log-probabilities are the learner's.
    assert metrics[0]["policy/mismatch_max"] < 1e-4


def test_critic_is_trained_on_our_returns(train: Train, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "algorithm=ppo", "steps=2", "mini_batches=2", "epochs=2", "restarts=0")
    metrics = read_metrics(run)
    assert [record["step"] for record in metrics] == [1, 2]
    assert all(np.isfinite(record["critic/loss"]) for record in metrics)


def test_killed_trainer_rank_and_balancer_restart_the_job_from_its_checkpoint(train: Train, tmp_path: Path) -> None:
    # A worker scores 12 chains until the end of the first step, before which there is no checkpoint, and 20 until the
    # end of the second one. From there, it scores 24 until the end of the fourth.
    recipe = prepare(tmp_path, trainer=8, rank=16, balancer=22)
    run = train(tmp_path / "run", "steps=4", recipe=recipe)
    deaths = sorted(path.name for path in (tmp_path / "deaths").iterdir())
    assert deaths == ["balancer.done", "rank.done", "trainer.done"]
    assert [record["step"] for record in read_metrics(run)] == [1, 2, 3, 4]
    assert os.path.exists(run.report)
    output = (tmp_path / "run.log").read_text()
    assert output.count("the job failed and starts again") == 3
    assert output.count("starts again from the beginning") == 1


def test_reward_that_always_raises_ends_the_run_without_a_restart(train: Train, tmp_path: Path) -> None:
    recipe = Path(shutil.copy(RECIPE, tmp_path / "recipe.py"))
    with recipe.open("a") as file:
        file.write("""
eval_tasks = []

@reward
def broken(prediction: str) -> float:
    raise ValueError("no such column")

def agent(**model: Any) -> HFAgent:
    return HFAgent(**model, tools=[Lookup], reward=broken)
""")
    run = train(tmp_path / "run", recipe=str(recipe), succeeds=False)
    output = " ".join((tmp_path / "run.log").read_text().split())
    assert "not one of the 16 chains of step 1 can be trained; most often: reward" in output
    assert "no such column" in output
    assert "starts again" not in output
    assert run.records() == []


def test_killed_node_restarts_the_job_on_another_one(train: Train, another_node: None, tmp_path: Path) -> None:
    run = train(tmp_path / "run", "steps=4", recipe=prepare(tmp_path, node=16))
    assert (tmp_path / "deaths" / "node.done").exists()
    metrics = read_metrics(run)
    assert [record["step"] for record in metrics] == [1, 2, 3, 4]
    assert all(record["chains"] == 16 for record in metrics)


def test_workers_share_one_environment_and_steps_without_groups_count(train: Train, tmp_path: Path) -> None:
    recipe = shutil.copy(RECIPE.with_name("recipe_ray.py"), tmp_path / "recipe.py")
    run = train(tmp_path / "run", "restarts=0", recipe=str(recipe))
    lines = [line.split(maxsplit=2) for line in (tmp_path / "seen").read_text().splitlines()]
    resets = [(process, question) for what, process, question in lines if what == "reset"]
    assert len({process for process, _ in resets}) == 1  # one instance serves both workers
    assert len(resets) == 8  # once for each group
    workers: dict[str, set[str]] = {}
    for what, process, question in lines:
        if what == "chain":
            workers.setdefault(question, set()).add(process)
    assert all(len(names) == 1 for names in workers.values())  # a group stays on one worker
    assert len(set.union(*workers.values())) == 2
    for record in read_metrics(run):
        assert record["chains"] == 8
        assert record["selection/groups"] == 0
    state = torch.load(run.checkpoints / "global_step_2/actor/extra_state_world_size_2_rank_0.pt", weights_only=False)
    assert state["lr_scheduler"]["last_epoch"] == 2
