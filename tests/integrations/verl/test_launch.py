"""What the driver decides without a cluster: the device, and the checkpoint from which a job starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.integrations.verl import launch
from agentfly.integrations.verl.config import STATE_FILE, ClusterConfig
from agentfly.runs import RunDirectory
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
