"""Checkpoints are complete or absent, and the last valid one survives failures."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from agentfly.errors import ConfigError, DataError
from agentfly.training.checkpoint import CheckpointManager, TrainerState


def state(step: int) -> TrainerState:
    return TrainerState(step, {"moment": torch.full((3,), float(step))}, {"feed": step * 10, "best": None})


def write_model(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"weights")


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    out = CheckpointManager(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        out.save(state(step), write_model)
    return out


def test_saved_state_is_restored(manager: CheckpointManager) -> None:
    loaded, model = manager.load()
    assert (loaded.step, loaded.values) == (2, {"feed": 20, "best": None})
    assert loaded.tensors["moment"].tolist() == [2.0, 2.0, 2.0]
    assert (model / "weights.bin").read_bytes() == b"weights"


def test_newest_and_best_checkpoints_are_kept(manager: CheckpointManager) -> None:
    for step in (3, 4, 5):
        manager.save(state(step), write_model, best=2)
    assert manager.steps() == [2, 4, 5]
    manager.save(state(6), write_model, best=6)
    assert manager.steps() == [5, 6]


def test_earlier_step_can_be_loaded(manager: CheckpointManager) -> None:
    assert manager.load(1)[0].step == 1
    with pytest.raises(ConfigError, match="there are those of 1, 2"):
        manager.load(7)


def test_resuming_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never got that far"):
        CheckpointManager(tmp_path, 2).load()


def test_full_disk_is_reported_and_keeps_earlier_checkpoints(manager: CheckpointManager) -> None:
    def fail_on_full_disk(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"wei")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match="No space left on device; the one of step 2 is complete"):
        manager.save(state(3), fail_on_full_disk)
    assert manager.steps() == [1, 2]
    assert manager.load()[0].step == 2
    assert not list(manager.path(3).parent.glob(".*"))


@pytest.mark.parametrize("name", ["model/weights.bin", "trainer.safetensors", "trainer.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["removed", "cut", "changed"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture, name: str, harm: str
) -> None:
    path = manager.path(2) / name
    whole = path.read_bytes()
    match harm:
        case "removed":
            path.unlink()
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "changed":
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    loaded, _ = manager.load()
    assert loaded.step == 1
    assert f"{manager.path(2)} is not a valid checkpoint" in caplog.text
    if name != "manifest.json" or harm != "removed":  # without its manifest it is no checkpoint at all
        with pytest.raises(DataError, match=r"is damaged .* --from-step 1"):
            manager.load(2)
    assert manager.load(1)[0].step == 1


def test_incomplete_checkpoint_of_a_killed_run_is_ignored(manager: CheckpointManager) -> None:
    draft = manager.path(3).parent / ".step-000003.draft"
    (draft / "model").mkdir(parents=True)
    (draft / "model" / "weights.bin").write_bytes(b"half")
    assert manager.steps() == [1, 2]
    manager.save(state(3), write_model)
    assert manager.load()[0].step == 3
    assert not draft.exists()


def test_a_stray_folder_or_file_is_skipped_with_a_warning(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager.path(900_000).mkdir()
    (manager.path(900_000) / "notes.txt").write_text("mine")
    manager.path(900_001).touch()
    sealed = manager.path(900_002)
    sealed.mkdir()
    (sealed / "manifest.json").write_text('{"files": {}}')
    assert manager.load()[0].step == 2
    assert [step for step in (900_000, 900_001, 900_002) if str(manager.path(step)) not in caplog.text] == []
    assert "model is missing" in caplog.text


def test_a_stray_folder_is_neither_counted_nor_removed(manager: CheckpointManager) -> None:
    manager.path(900_000).mkdir()
    manager.remove_after(2)
    for step in (3, 4, 5):
        manager.save(state(step), write_model)
    assert manager.steps() == [4, 5]
    assert manager.path(900_000).is_dir()


def test_without_a_valid_checkpoint_every_candidate_is_named(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, 2)
    for step in (3, 7):
        checkpoints.path(step).mkdir()
    with pytest.raises(DataError, match=r"no checkpoint .* is valid: step-000007 .*; step-000003 "):
        checkpoints.load()


def test_later_checkpoints_can_be_removed(manager: CheckpointManager) -> None:
    manager.remove_after(1)
    assert manager.steps() == [1]


def test_repeated_step_replaces_its_checkpoint(manager: CheckpointManager) -> None:
    manager.save(TrainerState(2, {"moment": torch.zeros(1)}, {"feed": 0}), write_model)
    assert manager.load()[0].values == {"feed": 0}
