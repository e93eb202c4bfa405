"""Weights on their way: complete folders, and nothing kept of what does not fit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="weights are tensors: pip install 'agentfly-rl[train]'")

from safetensors.torch import load_file, save_file  # noqa: E402

from agentfly.backends import weight_files as module  # noqa: E402
from agentfly.backends.weight_files import WeightFolder, lora_of  # noqa: E402
from agentfly.errors import ConfigError  # noqa: E402

LORA = {"r": 2, "lora_alpha": 4, "target_modules": {"q"}}


@pytest.fixture
def handover(tmp_path: Path) -> Iterator[WeightFolder]:
    model, place = tmp_path / "model", tmp_path / "place"
    model.mkdir()
    place.mkdir()
    save_file({"a.weight": torch.zeros(2, 3), "b.weight": torch.ones(3)}, model / "model.safetensors")
    save_file({"other": torch.zeros(1)}, model / "consolidated.safetensors")
    (model / "config.json").write_text("{}")
    made = WeightFolder(str(model), lora_of(LORA)[0], None, place)
    yield made
    made.close()
    assert not list(place.iterdir())


def read(folder: Path | str) -> dict[str, list[Any]]:
    files = sorted(Path(folder).glob("*.safetensors"))
    return {name: value.tolist() for file in files for name, value in load_file(file).items()}


def test_a_folder_is_a_whole_model_and_the_one_before_goes(
    handover: WeightFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD", 1)
    first = handover.write([("b.weight", torch.full((3,), 2.0))])
    assert first.model is not None
    assert read(first.model) == {"a.weight": [[0.0] * 3] * 2, "b.weight": [2.0] * 3}
    assert (first.model / "config.json").exists()
    handover.keep(first)
    second = handover.write(iter([("base_model.model.a.base_layer.weight", torch.ones(2, 3))]))
    assert second.model is not None
    assert read(second.model) == {"a.weight": [[1.0] * 3] * 2, "b.weight": [2.0] * 3}
    handover.keep(second)
    assert handover.model == str(second.model)
    assert not first.model.exists()


def test_an_adapter_is_written_as_peft_reads_it(handover: WeightFolder) -> None:
    handed = handover.write(
        [("base_model.model.x.q.lora_A.default.weight", torch.ones(2, 3)), ("x.q.lora_B.weight", torch.ones(3, 2))]
    )
    assert handed.model is None
    assert handed.adapter is not None
    assert set(read(handed.adapter)) == {f"base_model.model.x.q.lora_{each}.weight" for each in "AB"}
    config = json.loads((handed.adapter / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"], config["peft_type"]) == (2, ["q"], "LORA")
    handover.keep(handed)
    assert lora_of(str(handover.adapter)) == (config, handover.adapter)


def test_the_head_of_a_model_that_shares_it_is_left_out_and_nothing_is_nothing(handover: WeightFolder) -> None:
    assert handover.write([("lm_head.weight", torch.ones(5))]) == handover.write(()) == module.WeightFiles(None, None)


def test_what_does_not_fit_leaves_nothing(handover: WeightFolder, tmp_path: Path) -> None:
    for weights, said in (
        ([("a.weight", torch.zeros(2, 3)), ("c", torch.zeros(1))], "no weight 'c'; it has a.weight, b.weight"),
        ([("a.weight", torch.zeros(2))], r"shape \(2,\), not \(2, 3\)"),
        ([("a.weight", torch.zeros(2, 3))] * 2, "came twice"),
        ([("a.weight", [1])], "is a list, not a tensor"),
        ([7], "could not be read"),
        (None, "could not be read"),
    ):
        with pytest.raises(ConfigError, match=said):
            handover.write(weights)  # type: ignore[arg-type]
    assert not [each for room in (tmp_path / "place").iterdir() for each in room.iterdir()]


def test_a_place_that_is_none_is_refused(tmp_path: Path, handover: WeightFolder) -> None:
    elsewhere = WeightFolder(handover.model, None, None, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is no folder; name one that vLLM's workers can read too"):
        elsewhere.write([("b.weight", torch.zeros(3))])
