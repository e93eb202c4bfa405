"""What the driver decides without a cluster: the device, the checkpoint of a start, and how often a job starts."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
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
from agentfly.integrations.verl import launch, recorder
from agentfly.integrations.verl.config import STATE_FILE, ClusterConfig
from agentfly.integrations.verl.recorder import RunRecorder
from agentfly.runs import Progress, RunDirectory, RunWriter, StepRecord
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


def test_sigterm_is_handled_as_before_ray_was_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    previous_handler = signal.getsignal(signal.SIGTERM)
    ray = SimpleNamespace(
        is_initialized=lambda: False, init=lambda **_: signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
    )
    monkeypatch.setattr("agentfly.resources.runtimes.ray.runtime.import_ray", lambda: ray)
    try:
        launch.connect()
        assert signal.getsignal(signal.SIGTERM) is previous_handler
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


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
    ("starts", "error", "num_starts"),
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
    starts: list[list[Any]], error: Any, num_starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = iter(starts)
    ended: list[Any] = []

    def follow(*_: Any) -> Iterator[StepRecord]:
        for outcome in next(remaining):
            if isinstance(outcome, Exception):
                raise outcome
            yield StepRecord(outcome, 9)

    monkeypatch.setattr(launch, "follow", follow)
    monkeypatch.setattr(launch, "wait_until_free", lambda *_: None)
    monkeypatch.setattr(launch, "end_job", lambda ray, job: ended.append(job))
    ray = make_ray(lambda from_step: None)
    spec: Any = SimpleNamespace(folder=tmp_path)
    cluster = ClusterConfig(restarts=1)
    with pytest.raises(error) if error else contextlib.nullcontext():
        launch.supervise(ray, cluster, spec, verl_config=None, environment={}, from_step=None)
    assert len(ended) == num_starts


def make_ray(open_run: Callable[[int | None], None]) -> Any:
    """Stands in for Ray where only `TrainingJob.open` is called."""
    job = SimpleNamespace(open=SimpleNamespace(remote=open_run))
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda *_, **__: None)
    return SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RayError, GetTimeoutError=TimeoutError),
        get=lambda answer, timeout: answer,
        remote=lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: job)),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node"),
        util=SimpleNamespace(scheduling_strategies=strategies),
    )


def test_start_that_died_before_its_first_step_is_repeated_from_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_steps: list[int | None] = []

    def open_run(from_step: int | None) -> None:
        from_steps.append(from_step)
        if len(from_steps) == 1:
            raise RayError("the process died")

    def follow(*_: Any) -> Iterator[StepRecord]:
        if len(from_steps) == 2:
            raise RayError("the process died while it loaded")
        yield StepRecord(len(from_steps), 9)
        if len(from_steps) == 3:
            raise RayError("the process died")

    monkeypatch.setattr(launch, "follow", follow)
    monkeypatch.setattr(launch, "wait_until_free", lambda *_: None)
    monkeypatch.setattr(launch, "end_job", lambda *_: None)
    spec: Any = SimpleNamespace(folder=tmp_path)
    cluster = ClusterConfig(restarts=3)
    launch.supervise(make_ray(open_run), cluster, spec, verl_config=None, environment={}, from_step=4)
    assert from_steps == [4, 4, 4, None]


def test_later_and_incomplete_checkpoints_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folder = tmp_path / "checkpoints" / f"global_step_{step}"
        (folder / "actor").mkdir(parents=True)
        if step < 3:
            (folder / STATE_FILE).touch()
    with RunWriter.create(tmp_path, {}) as writer:
        for step in (1, 2, 3):
            writer.append(StepRecord(step, 3, {"reward/mean": 0.0}))
    spec: Any = SimpleNamespace(folder=tmp_path, settings={"loggers": []})

    def rewind(from_step: int | None) -> tuple[int | None, list[str], list[int]]:
        contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        opened = RunRecorder(spec, from_step)
        assert opened.poll() == ([], None)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == contents
        opened.rewind()  # once everything is loaded
        assert opened.poll() == ([], Progress("start"))
        opened.close()
        run = RunDirectory(tmp_path)
        folders = sorted(folder.name for folder in run.checkpoints.iterdir())
        return opened.start, folders, [record.step for record in run.records()]

    assert rewind(None) == (2, ["global_step_1", "global_step_2"], [1, 2])
    assert rewind(1) == (1, ["global_step_1"], [1])
    with pytest.raises(ConfigError, match=r"there is no checkpoint of step 2; there are \[1\]"):
        rewind(2)
    (tmp_path / "checkpoints/global_step_1" / STATE_FILE).unlink()
    assert rewind(None) == (None, [], [])
    assert RunDirectory(tmp_path).config == {"loggers": []}


def test_another_number_of_training_processes_is_refused(tmp_path: Path) -> None:
    actor = tmp_path / "checkpoints/global_step_7/actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_4_rank_0.pt").touch()
    (actor.parent / STATE_FILE).touch()
    launch.refuse_other_ranks(ClusterConfig(nodes=2, gpus=2), tmp_path)
    with pytest.raises(ConfigError, match=r"nodes=3 gpus=2 are 6 training processes, .*: model=.*/actor/huggingface"):
        launch.refuse_other_ranks(ClusterConfig(nodes=3, gpus=2), tmp_path)


def test_run_that_another_process_writes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "LOCK_SECONDS", 0)
    spec: Any = SimpleNamespace(folder=tmp_path, settings={})
    with RunWriter.create(tmp_path, {}), pytest.raises(ConfigError, match="is being written by process"):
        RunRecorder(spec)
