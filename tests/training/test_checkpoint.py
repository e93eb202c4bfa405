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
def kept(tmp_path: Path) -> CheckpointManager:
    out = CheckpointManager(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        out.save(state(step), write_model)
    return out


def test_saved_state_is_restored(kept: CheckpointManager) -> None:
    loaded, model = kept.load()
    assert (loaded.step, loaded.values) == (2, {"feed": 20, "best": None})
    assert loaded.tensors["moment"].tolist() == [2.0, 2.0, 2.0]
    assert (model / "weights.bin").read_bytes() == b"weights"


def test_newest_and_best_checkpoints_are_kept(kept: CheckpointManager) -> None:
    for step in (3, 4, 5):
        kept.save(state(step), write_model, best=2)
    assert kept.steps() == [2, 4, 5]
    kept.save(state(6), write_model, best=6)
    assert kept.steps() == [5, 6]


def test_earlier_step_can_be_loaded(kept: CheckpointManager) -> None:
    assert kept.load(1)[0].step == 1
    with pytest.raises(ConfigError, match="there are those of 1, 2"):
        kept.load(7)


def test_resuming_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never got that far"):
        CheckpointManager(tmp_path, 2).load()


def test_full_disk_is_reported_and_keeps_earlier_checkpoints(kept: CheckpointManager) -> None:
    def full(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"wei")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match="No space left on device; the one of step 2 is complete"):
        kept.save(state(3), full)
    assert kept.steps() == [1, 2]
    assert kept.load()[0].step == 2
    assert not list(kept.path(3).parent.glob(".*"))


@pytest.mark.parametrize("name", ["model/weights.bin", "trainer.safetensors", "trainer.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["removed", "cut", "changed"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    kept: CheckpointManager, caplog: pytest.LogCaptureFixture, name: str, harm: str
) -> None:
    path = kept.path(2) / name
    whole = path.read_bytes()
    match harm:
        case "removed":
            path.unlink()
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "changed":
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    loaded, _ = kept.load()
    assert loaded.step == 1
    assert f"{kept.path(2)} is not a valid checkpoint" in caplog.text
    if name != "manifest.json" or harm != "removed":  # without its manifest it is no checkpoint at all
        with pytest.raises(DataError, match=r"is damaged .* --from-step 1"):
            kept.load(2)
    assert kept.load(1)[0].step == 1


def test_incomplete_checkpoint_of_a_killed_run_is_ignored(kept: CheckpointManager) -> None:
    draft = kept.path(3).parent / ".step-000003.draft"
    (draft / "model").mkdir(parents=True)
    (draft / "model" / "weights.bin").write_bytes(b"half")
    assert kept.steps() == [1, 2]
    kept.save(state(3), write_model)
    assert kept.load()[0].step == 3
    assert not draft.exists()


def test_a_stray_folder_or_file_is_skipped_with_a_warning(
    kept: CheckpointManager, caplog: pytest.LogCaptureFixture
) -> None:
    kept.path(900_000).mkdir()
    (kept.path(900_000) / "notes.txt").write_text("mine")
    kept.path(900_001).touch()
    sealed = kept.path(900_002)
    sealed.mkdir()
    (sealed / "manifest.json").write_text('{"files": {}}')
    assert kept.load()[0].step == 2
    assert [step for step in (900_000, 900_001, 900_002) if str(kept.path(step)) not in caplog.text] == []
    assert "model is missing" in caplog.text


def test_a_stray_folder_is_neither_counted_nor_removed(kept: CheckpointManager) -> None:
    kept.path(900_000).mkdir()
    kept.remove_after(2)
    for step in (3, 4, 5):
        kept.save(state(step), write_model)
    assert kept.steps() == [4, 5]
    assert kept.path(900_000).is_dir()


def test_without_a_valid_checkpoint_every_candidate_is_named(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, 2)
    for step in (3, 7):
        checkpoints.path(step).mkdir()
    with pytest.raises(DataError, match=r"no checkpoint .* is valid: step-000007 .*; step-000003 "):
        checkpoints.load()


def test_later_checkpoints_can_be_removed(kept: CheckpointManager) -> None:
    kept.remove_after(1)
    assert kept.steps() == [1]


def test_repeated_step_replaces_its_checkpoint(kept: CheckpointManager) -> None:
    kept.save(TrainerState(2, {"moment": torch.zeros(1)}, {"feed": 0}), write_model)
    assert kept.load()[0].values == {"feed": 0}
