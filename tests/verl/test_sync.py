"""Synchronous training on verl over two Ray nodes: the same chains, advantages and files as a local run.

One run trains GRPO undisturbed; another trains GiGPO on folded chains with turn rewards while a chain worker and a
rollout server are killed.
"""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentfly.algorithms import build_algorithm
from agentfly.algorithms.base import Group
from agentfly.cli.recipes import Recipe
from agentfly.cli.train import plan_recipe
from agentfly.errors import ConfigError
from agentfly.runs import RunDirectory
from agentfly.training.selection import select_groups
from tests.verl.conftest import RECIPE, SESSIONS, Train, cluster_environment, read_metrics

pytestmark = pytest.mark.timeout(1800)
STEPS = 3


@pytest.fixture(scope="module")
def undisturbed_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("sync") / "run")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The same recipe, trained in this process."""
    from agentfly.training.trainer import Trainer

    folder = tmp_path_factory.mktemp("local") / "run"
    asyncio.run(Trainer.create(plan_recipe(Recipe(RECIPE), {"loggers": []}), folder).run())
    return RunDirectory(folder)


@pytest.fixture(scope="module")
def disturbed_run(train: Train, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """GiGPO on folded chains; a worker dies in the second step, and a server in a later one."""
    folder = tmp_path_factory.mktemp("deaths")
    recipe = shutil.copy(RECIPE, folder / "recipe.py")
    (folder / "deaths").mkdir()
    (folder / "deaths" / "worker").write_text("15")
    (folder / "deaths" / "server").write_text("20")
    options = ["algorithm=gigpo", 'run_options={"strategy": "step"}', "steps=5"]
    return train(folder / "run", *options, recipe=str(recipe))


def test_chains_of_the_first_step_are_those_of_a_local_run(undisturbed_run: RunDirectory, local: RunDirectory) -> None:
    local_chains, verl_chains = local.trajectories(1), undisturbed_run.trajectories(1)
    assert len(local_chains) == len(verl_chains) == 16
    for one, other in zip(local_chains, verl_chains, strict=True):
        assert one.trajectory.id == other.trajectory.id
        for local_segment, sent in zip(one.trajectory.segments, other.trajectory.segments, strict=True):
            assert local_segment.tokens.tolist() == sent.tokens.tolist()
            assert local_segment.mask.tolist() == sent.mask.tolist()
            assert np.abs(local_segment.logprobs - sent.logprobs).max() < 1e-4
            assert set(sent.weight_versions[sent.mask]) == {0}
        assert len(one.advantages) == len(other.advantages)
        for credit, row in zip(one.advantages, other.advantages, strict=True):
            assert np.abs(credit - row).max() <= 1e-6


def test_first_update_is_that_of_a_local_run(undisturbed_run: RunDirectory, local: RunDirectory) -> None:
    local_metrics, verl_metrics = read_metrics(local)[0], read_metrics(undisturbed_run)[0]
    for name in ("reward/mean", "selection/groups", "policy/tokens", "policy/learning_rate", "chain/turns"):
        assert verl_metrics[name] == pytest.approx(local_metrics[name]), name
    for name in ("policy/loss", "policy/loss_policy", "policy/grad_norm", "policy/entropy"):
        assert verl_metrics[name] == pytest.approx(local_metrics[name], rel=1e-3, abs=1e-5), name
    assert verl_metrics["policy/mismatch_max"] < 1e-4  # the servers sample with the weights that are trained
    assert verl_metrics["policy/staleness_max"] == 0


@pytest.mark.parametrize("name", ["undisturbed_run", "disturbed_run"])
def test_advantages_are_those_of_the_algorithm(name: str, request: pytest.FixtureRequest) -> None:
    run: RunDirectory = request.getfixturevalue(name)
    algorithm = build_algorithm("grpo" if name == "undisturbed_run" else "gigpo")
    compared = 0
    for step in range(1, STEPS + 1):
        stored = run.trajectories(step)
        selection = select_groups(
            [chain.trajectory for chain in stored], min_chains=2, keep_zero_variance=False, segment_reward="broadcast"
        )
        by_id = {chain.trajectory.id: chain.advantages for chain in stored}
        estimates = algorithm.compute_advantages([Group(episodes) for episodes in selection.groups])
        for episodes, group in zip(selection.groups, estimates, strict=True):
            for episode, estimate in zip(episodes, group, strict=True):
                trained = [
                    advantages
                    for advantages, segment in zip(estimate.advantages, episode.segments, strict=True)
                    if segment.mask.any()
                ]
                rows = by_id[episode.trajectory.id]
                assert len(rows) == len(trained)
                for expected, row in zip(trained, rows, strict=True):
                    assert np.abs(expected - row).max() <= 1e-6
                    compared += 1
    assert compared > 10
    if name == "disturbed_run":
        assert max(len(chain.trajectory.segments) for chain in stored) > 1


def test_run_directory_is_complete(undisturbed_run: RunDirectory) -> None:
    records = undisturbed_run.records()
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert records[0].eval is not None
    assert records[-1].eval is not None
    assert len(undisturbed_run.trajectories(3, held_out=True)) == 8
    assert undisturbed_run.report.is_file()
    for record in records[1:]:
        assert record.metrics["chains"] == 16
        assert {"generate", "tools", "waiting", "update", "publish", "evaluate", "other"} <= set(record.seconds)
    stored = undisturbed_run.config
    assert stored["on"] == "verl"
    assert stored["cluster"]["nodes"] == 2


def test_checkpoint_loads_in_transformers(undisturbed_run: RunDirectory) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = sorted(undisturbed_run.checkpoints.glob("global_step_*"))
    assert [folder.name for folder in folders][-2:] == ["global_step_2", "global_step_3"]
    model = AutoModelForCausalLM.from_pretrained(folders[-1] / "actor" / "huggingface", dtype=torch.float32)
    previous_model = AutoModelForCausalLM.from_pretrained(folders[-2] / "actor" / "huggingface", dtype=torch.float32)
    AutoTokenizer.from_pretrained(folders[-1] / "actor" / "huggingface")
    changed = [
        not torch.equal(one, other) for one, other in zip(model.parameters(), previous_model.parameters(), strict=True)
    ]
    assert any(changed)
    state = json.loads((folders[-1] / "agentfly.json").read_text())
    assert state["step"] == 3
    assert state["best"] is not None


def test_killed_worker_and_server_cost_no_chain(disturbed_run: RunDirectory) -> None:
    deaths = disturbed_run.path.parent / "deaths"
    assert sorted(path.name for path in deaths.iterdir()) == ["server.done", "worker.done"]
    metrics = read_metrics(disturbed_run)
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5]
    for line in metrics:
        assert line["chains"] == 16
        assert line["treatment/lost"] == 0
        assert line["policy/mismatch_max"] < 1e-4  # a server that was restarted has the new weights
    assert metrics[-1]["rollout/reruns"] >= 1


def test_workers_can_be_restarted_without_objects_of_other_processes(undisturbed_run: RunDirectory) -> None:
    """Ray warns where the constructor of an actor that it restarts has arguments that may be lost."""
    logs = list(SESSIONS.glob("session_*/logs/python-core-worker-*.log"))
    assert logs
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    assert not [line for line in lines if "max_restarts > 0" in line and "ChainWorker" in line]


def test_restarted_server_without_weights_counts_as_dead(ray_address: str) -> None:
    """A client takes such a server out of the balancer; a request that waited would wait for the next weight sync."""
    program = """
import ray
from ray.exceptions import RayActorError
from agentfly.integrations.verl.engine import EngineServer
from agentfly.models import resolve
ray.init(address="auto", log_to_driver=False)
start = ray.remote(EngineServer).options(num_cpus=0.01, max_concurrency=8).remote
server = start(resolve("tiny"), "float32", "cpu", 0.5)
request = {"prompt_ids": [5, 6, 7], "sampling_params": {"temperature": 1.0, "max_tokens": 4}, "request_id": "a"}
try:
    ray.get(server.generate.remote(**request))
except RayActorError as error:
    print("dead:", "has no weights before the next sync" in str(error))
ray.get(server.load_weights.remote({}, 3))
print(ray.get(server.generate.remote(**request)).extra_fields)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=cluster_environment(ray_address), capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-2:] == ["dead: True", "{'global_steps': 3}"], done.stdout + done.stderr


def test_raw_keys_of_verl_override_ours() -> None:
    from agentfly.integrations.verl.launch import compose_config

    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    config = compose_config({key: 0.1, "trainer.device": "cpu"}, {key: 0.7, "+trainer.mine": [1, 2]})
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.7
    assert config.trainer.device == "cpu"
    assert config.trainer.mine == [1, 2]
    with pytest.raises(ConfigError, match=r"verl has no key 'trainer\.mine'; write verl\.\+trainer\.mine=… to add it"):
        compose_config({}, {"trainer.mine": 1})


def test_request_that_was_aborted_before_its_first_token() -> None:
    from verl.workers.rollout.replica import TokenOutput

    from agentfly.backends.base import Request
    from agentfly.integrations.verl.backend import VerlBackend
    from agentfly.types import FinishReason, Sampling

    class Client:
        async def generate(self, *_: object, **__: object) -> TokenOutput:
            return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"min_global_steps": 3})

    backend = VerlBackend(Client(), context_length=8)
    completion = asyncio.run(backend.generate(Request([1, 2], Sampling())))
    assert completion.finish is FinishReason.ABORTED
    assert list(completion.token_ids) == list(completion.logprobs) == []


def test_adapted_kl_coefficient_and_best_step_are_resumed(tmp_path: Path) -> None:
    """With a stub of verl's trainer: on CPUs there is no run with KL, since verl's reference model needs a GPU."""
    from agentfly.integrations.verl.trainer import AgentFlyTrainer

    class Base:
        def __init__(self, resume_from: Path | None) -> None:
            trainer = SimpleNamespace(default_local_dir=str(tmp_path), resume_from_path=resume_from)
            self.config = SimpleNamespace(trainer=trainer)
            self.replay_buffer = SimpleNamespace()
            self.global_steps = 3

        def on_init_end(self) -> None: ...
        def _save_checkpoint(self) -> None:
            (tmp_path / "global_step_3").mkdir()

    class Stub(AgentFlyTrainer, Base): ...

    plan = plan_recipe(Recipe(RECIPE), {"kl": {"coef": 0.1, "target": 0.05, "placement": "reward"}})
    spec: Any = SimpleNamespace(make_plan=lambda: plan)
    saved = Stub(None, spec, None)  # type: ignore[arg-type]
    saved._kl.update(0.2, chains=64)
    saved._best = (0.5, 2)
    saved._save_checkpoint()
    resumed = Stub(tmp_path / "global_step_3", spec, None)  # type: ignore[arg-type]
    assert resumed._kl.coef == 0.1
    resumed.on_init_end()
    assert resumed._kl.coef == saved._kl.coef > 0.1
    assert resumed._best == (0.5, 2)
