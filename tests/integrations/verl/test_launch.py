"""What the driver decides without a cluster: the device, the checkpoint of a start, and how often a job starts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.errors import (
    AgentFlyError,
    BackendFault,
    ConfigError,
    EnvironmentFault,
    Fault,
    NonFiniteError,
    RankError,
    RewardFault,
    WeightSyncError,
)
from agentfly.integrations.verl import launch
from agentfly.integrations.verl.config import STATE_FILE, ClusterConfig
from agentfly.runs import RunDirectory, StepRecord
from agentfly.training.config import TrainConfig


def ray_with(**resources: float) -> Any:
    """What Ray reports of a cluster with one node."""
    node = {"Alive": True, "Resources": {"CPU": 16.0, "GPU": 1.0, **resources}}
    return SimpleNamespace(nodes=lambda: [node])


def test_device_is_a_gpu_if_ray_reports_its_type_or_the_user_says_so() -> None:
    cluster = ClusterConfig(gpus=1)
    assert launch.check_cluster(ray_with(), cluster) == "cpu"
    assert launch.check_cluster(ray_with(**{"accelerator_type:H200": 1.0}), cluster) == "cuda"
    forced = ClusterConfig(gpus=1, verl={"trainer.device": "cuda"})
    assert launch.check_cluster(ray_with(), forced) == "cuda"
    with pytest.raises(ConfigError, match=r"verl\.trainer\.device=tpu: it is one of cuda, cpu"):
        launch.check_cluster(ray_with(), ClusterConfig(gpus=1, verl={"trainer.device": "tpu"}))
    with pytest.raises(ConfigError, match="asks for 1 nodes with 8 GPU, 26 CPU each; the cluster has 0 of them"):
        launch.check_cluster(ray_with(), ClusterConfig())


def test_vision_model_is_refused_by_name_before_the_cluster_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "require_verl", lambda: None)
    monkeypatch.setattr(launch, "connect", lambda: pytest.fail("connected to Ray"))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    plan: Any = SimpleNamespace(config=TrainConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"{tmp_path}' is a vision model.*: leave --on verl out; gpus=N"):
        launch.train_on_verl(lambda: plan, ClusterConfig(), tmp_path / "run")


class ActorDied(Exception):
    """What Ray raises for a call of an actor that is dead."""

    def __init__(self, *, actor_init_failed: bool) -> None:
        super().__init__()
        self.actor_init_failed = actor_init_failed


@pytest.mark.parametrize(
    ("cause", "first", "later"),
    [
        (ActorDied(actor_init_failed=False), True, True),
        (RuntimeError("connection closed by peer"), True, True),
        (BackendFault("no server is left"), True, True),
        (EnvironmentFault("its node died"), True, True),
        (RankError("a group ended 8 workers"), True, True),
        (ActorDied(actor_init_failed=True), False, True),
        (KeyError("a key of verl"), False, True),
        (ImportError("a package of the recipe"), False, True),
        (ConfigError("a field"), False, False),
        (Fault("every chain timed out"), False, False),
        (RewardFault("the reward raised"), False, False),
        (NonFiniteError("loss"), False, False),
        (WeightSyncError("old weights"), False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_a_lost_process_starts_the_job_again(cause: BaseException, first: bool, later: bool) -> None:
    assert launch.can_restart(cause, first_step=True) is first
    assert launch.can_restart(cause, first_step=False) is later


class RayError(Exception):
    """Ray's error of a call, with the exception that the call raised."""

    def __init__(self, cause: BaseException | None = None) -> None:
        super().__init__()
        self.cause = cause


@pytest.mark.parametrize(
    ("starts", "error", "begun"),
    [
        ([[1, RayError()], [2, RayError()], [3, RayError()], [4]], None, 4),  # each has a new step
        ([[RayError()], [1, RayError()], [RayError()], [2]], None, 4),  # one failure in a row is allowed
        ([[1, 2, RayError()], [1, 2, RayError()], [1, RayError()], [3]], AgentFlyError, 3),  # old steps are no progress
        ([[1, RayError(BackendFault("lost"))], [RayError(BackendFault("lost"))], [2]], None, 3),
        ([[RayError(BackendFault("lost"))], [RayError(BackendFault("lost"))], [1]], BackendFault, 2),
        ([[1, RayError(RewardFault("broken"))], [2]], RewardFault, 1),
        ([[RayError(KeyError("a key of verl"))], [1]], AgentFlyError, 1),
    ],
)
def test_job_starts_again_at_most_once_without_a_new_step(
    starts: list[list[Any]], error: Any, begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = iter(starts)
    ended: list[Any] = []

    def follow(*_: Any) -> Iterator[StepRecord]:
        for each in next(remaining):
            if isinstance(each, Exception):
                raise each
            yield StepRecord(each, 9)

    monkeypatch.setattr(launch, "follow", follow)
    monkeypatch.setattr(launch, "wait_until_free", lambda *_: None)
    monkeypatch.setattr(launch, "rewind", lambda *_: None)
    monkeypatch.setattr(launch, "end_job", lambda ray, job: ended.append(job))
    call = SimpleNamespace(remote=lambda *_: None)
    actor = SimpleNamespace(remote=lambda: SimpleNamespace(run=call))
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError), remote=lambda _: SimpleNamespace(options=lambda **_: actor)
    )
    run: Any = SimpleNamespace(config={"loggers": []}, checkpoints=tmp_path)
    spec: Any = SimpleNamespace(recorder=None)
    cluster = ClusterConfig(restarts=1)
    config = SimpleNamespace(trainer=SimpleNamespace())
    with pytest.raises(error) if error else contextlib.nullcontext():
        launch.supervise(ray, cluster, run, spec, verl_config=config, environment={}, from_step=None)
    assert len(ended) == begun


def test_later_and_incomplete_checkpoints_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        (folder / "actor").mkdir(parents=True)
        if step < 3:
            (folder / STATE_FILE).touch()
    (tmp_path / "config.json").write_text("{}")
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch, "ask_recorder", lambda recorder, folder, *call: calls.append(call))
    run = RunDirectory(tmp_path)

    def left() -> list[str]:
        return sorted(each.name for each in run.checkpoints.iterdir())

    assert launch.rewind(run, None, None) == 2
    assert left() == ["global_step_1", "global_step_2"]
    assert launch.rewind(run, None, 1) == 1
    assert left() == ["global_step_1"]
    with pytest.raises(ConfigError, match=r"there is no checkpoint of step 2; there are \[1\]"):
        launch.rewind(run, None, 2)
    (run.checkpoints / "global_step_1" / STATE_FILE).unlink()
    assert launch.rewind(run, None, None) is None
    assert left() == []
    assert calls == [("restart", 2), ("restart", 1), ("restart", -1)]
