"""The sharded learner on two and three ranks over gloo, against one process; failures; and a run with two ranks."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

torch = pytest.importorskip("torch", reason="training needs torch: pip install 'agentfly-rl[train]'")

from transformers import AutoModelForCausalLM  # noqa: E402

from agentfly.cli import train as cli_train  # noqa: E402
from agentfly.cli.recipes import Recipe  # noqa: E402
from agentfly.errors import ConfigError  # noqa: E402
from agentfly.runs import RunDirectory  # noqa: E402
from agentfly.training import TrainConfig  # noqa: E402
from agentfly.training.launch import launch_or_join_ranks  # noqa: E402
from agentfly.training.sharding import partition_by_length  # noqa: E402
from tests.commands import fork  # noqa: E402
from tests.training.sharded_program import CASES, build, exercise, resume, run_rank  # noqa: E402
from tests.vision_models import build_vision_model  # noqa: E402

RECIPE = Path(__file__).with_name("recipe_vowels.py")


def run_ranks(ranks: int, folder: Path, *arguments: str) -> list[int | None]:
    """Run the program on each rank until ranks 0 and 1 have ended, and return the exit codes.

    As the agent of torchrun does, this process has the store of the ranks, and kills those that wait for a failed one.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = True
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            environment = {name: str(value) for name, value in (variables | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            rank_process = fork(run_rank, environment, folder / f"rank-{rank}.txt", folder, *arguments)
            processes.append(stack.enter_context(rank_process))
        for process in processes[:2]:
            process.join(150)
        return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What one process gives, by case, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "vision-model").mkdir()
    build_vision_model("qwen3_vl", folder / "vision-model")
    outcomes = {}
    for case in CASES:
        outcomes[case] = exercise(build(case, folder), folder / case)
        torch.save(outcomes[case].get("state"), folder / f"{case}.pt")
    return folder, outcomes


def relative_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two tensors of the same name, relative to the norm of the second."""
    assert one.keys() == other.keys()
    return max(float((one[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)) for name, tensor in other.items())


def largest_difference(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def test_commands_of_the_docs_are_accepted_by_torchrun() -> None:
    from torch.distributed.run import parse_args

    page = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^\$ torchrun (.+?)(?:  +#.*)?$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        arguments = parse_args(command.split())
        assert arguments.module
        assert arguments.training_script == "agentfly"
        assert arguments.training_script_args[0] == "train"


@pytest.mark.parametrize(
    ("ranks", "how", "failure"),
    [
        (2, "kill", r"RuntimeError: .*Connection (closed|reset) by peer"),
        pytest.param(
            *(3, "raise", "RankError: rank 1 failed: BackendFault: the engine of rank 1 is gone"),
            marks=pytest.mark.slow_smoke,
        ),
    ],
)
def test_ranks_compute_what_one_process_computes_and_fail_together(
    ranks: int, how: str, failure: str, local: tuple[Path, dict[str, Any]]
) -> None:
    folder, expected = local
    codes = run_ranks(ranks, folder, how, *CASES)
    printed = [(folder / f"rank-{rank}.txt").read_text() for rank in range(ranks)]
    assert codes[:2] == [0, 1 if how == "raise" else -signal.SIGKILL], printed
    assert how == "kill" or "the engine of rank 1 is gone" in printed[1]
    outcomes = torch.load(folder / "sharded.pt", weights_only=False)
    for case, one in expected.items():
        many = outcomes[case]
        differences = {
            "gradients": relative_difference(many["gradients"], one["gradients"]),
            "scores": largest_difference(many["scores"], one["scores"]),
            "scores before the update": max(
                float(np.abs(many["logprobs"][name] - logprobs).max()) for name, logprobs in one["logprobs"].items()
            ),
        }
        assert many["logprobs"].keys() == one["logprobs"].keys()
        if "weights" in many:  # after three updates
            differences["scores after"] = largest_difference(many["later scores"], one["later scores"])
            differences["weights after"] = relative_difference(many["weights"], one["weights"])
        if "values" in many:  # of the critic, whose head starts with zeros
            assert max(np.abs(values).max() for values in one["values"]) > 0.01
            differences["values after"] = largest_difference(many["values"], one["values"])
        print(f"{ranks} ranks, {case}:", ", ".join(f"{name} {size:.1e}" for name, size in differences.items()))
        assert len(one["gradients"]) >= 20
        for name, difference in differences.items():
            assert difference < (5e-5 if name.startswith("scores") else 1e-5), name
        for measured, reference in zip(many["metrics"], one["metrics"], strict=False):
            for name, value in reference.items():
                if not name.startswith("update/seconds"):
                    assert measured[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        held, whole = many["numel"]
        assert whole / ranks <= held < 1.3 * whole / ranks  # rows do not divide by the number of ranks everywhere
        if "state" not in many:
            continue
        # Checkpoints: that of one process was loaded by the ranks, that of the ranks is loaded here.
        assert many["state"][0].keys() == one["state"][0].keys()
        resumed = resume(build(case, folder), folder / f"{case}-sharded", many["state"])
        assert relative_difference(resumed["weights"], many["resumed"]["weights"]) < 1e-5
        for name in ("policy/loss", "policy/grad_norm"):
            assert resumed["metrics"][name] == pytest.approx(many["resumed"]["metrics"][name], rel=1e-3, abs=1e-5)
    first, *others = outcomes["completions"]  # of an image, by the engine of each rank
    assert len(others) == ranks - 1
    assert all(completion.token_ids == first.token_ids for completion in others)
    assert all(np.allclose(completion.logprobs, first.logprobs, atol=1e-5) for completion in others)
    assert outcomes["not finite"].startswith("update 1: the loss is nan: look at the samples 3/0#0")
    assert re.match(failure, outcomes["failed"]), outcomes["failed"]


def test_rank_selects_its_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "5,7"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    for _ in range(2):  # a program may train several times
        assert not launch_or_join_ranks(TrainConfig())
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5"


def test_training_the_tower_on_several_ranks_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = {"train_tower": True}
    with pytest.raises(ConfigError, match=r"vision\.train_tower=true trains in one process: write gpus=1"):
        launch_or_join_ranks(TrainConfig(gpus=2, vision=tower), ("-m", "agentfly"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"start it without torchrun, or leave the tower frozen"):
        launch_or_join_ranks(TrainConfig(vision=tower))


@pytest.mark.slow_smoke
def test_run_on_two_ranks_is_stopped_and_equals_the_run_of_one_process(
    tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOWELS_MODEL", str(small_model))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    changes = ["steps=2", "loggers=[]", "evaluation.every=null", "precision=float32", "checkpoint.every=9"]
    changes += ["optimizer.learning_rate=0.001"]
    with pytest.raises(ConfigError, match=r"gpus=2, but torch .* sees 0 GPUs here: leave gpus out, or start the ranks"):
        cli_train.train_recipe(Recipe(RECIPE), [*changes, "gpus=2"], tmp_path / "refused")
    cli_train.train_recipe(Recipe(RECIPE), changes, tmp_path / "one")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # the ranks themselves find none, and take the CPU
    monkeypatch.setenv("VOWELS_STOP", str(16 + 12 + 1))  # after the evaluation and the first step
    arguments = ["train", str(RECIPE), *changes, "gpus=2", "--run", str(tmp_path / "two")]
    monkeypatch.setattr(cli_train, "COMMAND", ("-m", "agentfly", *arguments))
    with pytest.raises(SystemExit) as ended:
        cli_train.train_recipe(Recipe(RECIPE), [*changes, "gpus=2"], tmp_path / "two")
    assert ended.value.code == 128 + signal.SIGTERM
    (checkpoint,) = (tmp_path / "two" / "checkpoints").iterdir()
    assert checkpoint.name == "step-000001"
    AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    monkeypatch.undo()
    monkeypatch.setenv("VOWELS_MODEL", str(small_model))
    monkeypatch.setattr("agentfly.cli.train.launch_or_join_ranks", lambda *_, **__: False)  # one process resumes
    cli_train.resume_run(tmp_path / "two", None)
    one, two = (
        [record.metrics for record in RunDirectory(tmp_path / name).records() if record.metrics]
        for name in ("one", "two")
    )
    assert len(one) == len(two) == 2
    for single, sharded in zip(one, two, strict=True):
        for name in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/tokens", "policy/entropy"):
            assert sharded[name] == pytest.approx(single[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow_smoke
def test_ranks_end_with_a_killed_torchrun(tmp_path: Path, small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOWELS_MODEL", str(small_model))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "run"
    changes = ["steps=100000", "loggers=[]", "evaluation.every=null", "checkpoint.every=1"]
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"),
            *("agentfly", "train", str(RECIPE), *changes, "--run", str(folder)),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        while not (folder / "metrics.jsonl").exists():
            assert launcher.poll() is None, "the run failed"
            time.sleep(0.1)
        ranks = psutil.Process(launcher.pid).children()
        assert len(ranks) == 2
        with pytest.raises(
            ConfigError, match=r"is being written by process (\d+) \(`.*train.*`, for \d+ min\)"
        ) as error:
            cli_train.resume_run(folder, None)
        assert any(f"process {rank.pid} " in str(error.value) for rank in ranks)
    finally:
        launcher.kill()
        launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    monkeypatch.setattr("agentfly.cli.train.launch_or_join_ranks", lambda *_, **__: False)  # one process resumes
    done = RunDirectory(folder).records()[-1].step
    cli_train.resume_run(folder, None, [f"steps={done + 1}"])


def test_items_are_partitioned_by_length() -> None:
    assert partition_by_length([5, 1, 4, 2, 3], int, 2) == [[5, 2, 1], [4, 3]]
    assert partition_by_length([7], int, 3) == [[7], [], []]
