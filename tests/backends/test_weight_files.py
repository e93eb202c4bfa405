"""Weight updates as folders: complete checkpoints, and no files of weights that do not fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="weights are tensors: pip install 'agentfly-rl[train]'")

from safetensors.torch import load_file, save_file  # noqa: E402

from agentfly.backends import weight_files as module  # noqa: E402
from agentfly.backends.weight_files import WeightFolder, load_lora_config  # noqa: E402
from agentfly.errors import ConfigError  # noqa: E402
from tests.vision_models import build_vision_model  # noqa: E402

LORA = {"r": 2, "lora_alpha": 4, "target_modules": {"q"}}


@pytest.fixture
def weight_folder(tmp_path: Path) -> Iterator[WeightFolder]:
    model, parent = tmp_path / "model", tmp_path / "parent"
    model.mkdir()
    parent.mkdir()
    save_file({"a.weight": torch.zeros(2, 3), "b.weight": torch.ones(3)}, model / "model.safetensors")
    save_file({"other": torch.zeros(1)}, model / "consolidated.safetensors")
    (model / "config.json").write_text("{}")
    folder = WeightFolder(str(model), load_lora_config(LORA)[0], None, parent)
    yield folder
    folder.close()
    assert not list(parent.iterdir())


def read(folder: Path | str) -> dict[str, list[Any]]:
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: value.tolist() for file in files for name, value in load_file(file).items()}


def test_folder_is_a_complete_model_and_replaces_the_previous_one(
    weight_folder: WeightFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 1)
    first = weight_folder.write([("b.weight", torch.full((3,), 2.0))])
    assert first.model is not None
    assert read(first.model) == {"a.weight": [[0.0] * 3] * 2, "b.weight": [2.0] * 3}
    assert (first.model / "config.json").exists()
    weight_folder.commit(first)
    second = weight_folder.write(iter([("base_model.model.a.base_layer.weight", torch.ones(2, 3))]))
    assert second.model is not None
    assert read(second.model) == {"a.weight": [[1.0] * 3] * 2, "b.weight": [2.0] * 3}
    weight_folder.commit(second)
    assert weight_folder.model == str(second.model)
    assert not first.model.exists()


def test_adapter_is_written_in_the_format_of_peft(weight_folder: WeightFolder) -> None:
    files = weight_folder.write(
        [("base_model.model.x.q.lora_A.default.weight", torch.ones(2, 3)), ("x.q.lora_B.weight", torch.ones(3, 2))]
    )
    assert files.model is None
    assert files.adapter is not None
    assert set(read(files.adapter)) == {f"base_model.model.x.q.lora_{letter}.weight" for letter in "AB"}
    config = json.loads((files.adapter / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"], config["peft_type"]) == (2, ["q"], "LORA")
    weight_folder.commit(files)
    assert load_lora_config(str(weight_folder.adapter)) == (config, weight_folder.adapter)


def test_shared_output_head_and_empty_updates_write_nothing(weight_folder: WeightFolder) -> None:
    assert (
        weight_folder.write([("lm_head.weight", torch.ones(5))])
        == weight_folder.write(())
        == module.WeightFiles(None, None)
    )


def test_invalid_weights_are_rejected_and_leave_no_files(weight_folder: WeightFolder, tmp_path: Path) -> None:
    for weights, words in (
        ([("a.weight", torch.zeros(2, 3)), ("c", torch.zeros(1))], "no weight 'c'; it has a.weight, b.weight"),
        ([("a.weight", torch.zeros(2))], r"shape \(2,\), not \(2, 3\)"),
        ([("a.weight", torch.zeros(2, 3))] * 2, "came twice"),
        ([("a.weight", [1])], "is a list, not a tensor"),
        ([7], "could not be read"),
        (None, "could not be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            weight_folder.write(weights)  # type: ignore[arg-type]
    assert not [path for room in (tmp_path / "parent").iterdir() for path in room.iterdir()]


def test_missing_parent_folder_is_rejected(tmp_path: Path, weight_folder: WeightFolder) -> None:
    elsewhere = WeightFolder(weight_folder.model, None, None, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is not a folder; name one that vLLM's workers can read too"):
        elsewhere.write([("b.weight", torch.zeros(3))])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_weights_of_a_vision_model_get_their_names_in_the_checkpoint(family: str, tmp_path: Path) -> None:
    from agentfly.backends.engine.loading import load_model

    model = load_model(str(build_vision_model(family, tmp_path)), torch.device("cpu"), torch.float32)
    weights_by_name = {name: parameter.detach() for name, parameter in model.named_parameters()}
    folder = WeightFolder(str(tmp_path), lora=None, adapter=None, parent=None)
    names = [name for name, _ in folder.iterate(weights_by_name.items())]
    on_disk = load_file(tmp_path / "model.safetensors")
    assert sorted(names) == sorted(on_disk)
    assert any(name not in weights_by_name for name in names) == (family == "qwen2_5_vl")
    for (name, value), key in zip(folder.iterate(weights_by_name.items()), names, strict=True):
        assert torch.equal(value, on_disk[key]), name
