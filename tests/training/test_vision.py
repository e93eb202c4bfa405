"""Vision models in the learner: log-probabilities and gradients against the model's own forward pass with pixels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.algorithms.base import SegmentArrays
from agentfly.backends.engine.loading import load_model
from agentfly.backends.engine.vision import FEATURE_BYTES, tower_parameters
from agentfly.errors import ConfigError
from agentfly.templates.template import Template
from agentfly.training import TrainConfig
from agentfly.training.batch import Sample
from agentfly.training.local_learner import LocalLearner
from agentfly.training.lora import add_lora
from agentfly.training.memory import ModelSize, plan_memory
from agentfly.training.model import Policy
from tests.training.pieces import make_learner
from tests.vision_models import FAMILIES, build_vision_model, make_segments, open_template, score_with_pixels

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return build_vision_model(family, tmp_path_factory.mktemp(family))


def load(folder: Path) -> tuple[Any, Template]:
    model = load_model(str(folder), torch.device("cpu"), torch.float32)
    return model, open_template(folder)


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_equal_a_naive_implementation(folder: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, template = load(folder)
    segments = make_segments(template)
    naive = [score_with_pixels(model, template, segment) for segment in segments]
    torch.cat(naive).sum().backward()
    expected = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    if not packed:
        monkeypatch.setattr("agentfly.training.model.supports_packing", lambda _: False)
    policy = Policy(model, gradient_checkpointing=not packed)
    assert policy.backbone.packed == packed
    pieces = [SegmentArrays.from_segment(segment) for segment in segments]
    scores = policy(pieces, np.ones(sum(piece.num_sampled_tokens for piece in pieces)))[0]
    assert torch.allclose(scores, torch.cat(naive), atol=1e-5)
    scores.sum().backward()
    tower = {id(weight) for weight in tower_parameters(model)}
    compared = 0
    for name, parameter in model.named_parameters():
        if name in expected:
            scale = float(expected[name].abs().max()) + 1e-3
            assert parameter.grad is not None, name
            assert float((parameter.grad - expected[name]).abs().max()) < 1e-3 * scale, name
            compared += id(parameter) in tower
    assert compared  # the tower's gradients, too


def test_tower_is_frozen_by_default_and_trained_on_request(folder: Path) -> None:
    for train_tower in (False, True):
        model, template = load(folder)
        learner = make_learner(
            model, learning_rate=1e-3, precision="auto", train_tower=train_tower, micro_batch_tokens=150
        )
        before = [weight.detach().clone() for weight in tower_parameters(model)]
        samples = []
        for segment in make_segments(template):
            arrays = SegmentArrays.from_segment(segment)
            samples.append(Sample(arrays, np.where(arrays.mask, 1.0, 0.0).astype(np.float32)))
        learner.update(samples)
        changed = [not torch.equal(a, b) for a, b in zip(before, tower_parameters(model), strict=True)]
        assert any(changed) is train_tower
        arrays = samples[1].segment
        extra = 4 * len(arrays.image_positions) if train_tower else 0
        assert learner._runner._length(arrays) == arrays.num_input_tokens + extra


def test_adapters_are_added_to_the_language_model_only(folder: Path) -> None:
    model, template = load(folder)
    adapted = add_lora(model, 2)
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert names
    assert not any("visual" in name or "vision" in name for name in names)
    segments = [SegmentArrays.from_segment(segment) for segment in make_segments(template)]
    scores = LocalLearner(adapted).score(segments, 1.0)
    assert np.allclose(scores[1], LocalLearner(load(folder)[0]).score(segments, 1.0)[1], atol=1e-5)


def test_saved_model_loads_in_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model, template = load(folder)
    LocalLearner(model).save(tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    segment = make_segments(template)[1]
    with torch.no_grad():
        same = torch.allclose(score_with_pixels(loaded, template, segment), score_with_pixels(model, template, segment))
    assert same


def test_training_the_tower_of_a_text_model_is_refused() -> None:
    from tests.backends.engine.tiny import model_of

    with pytest.raises(ConfigError, match="has no vision tower"):
        LocalLearner(model_of(), train_tower=True)


def test_critic_and_reference_share_the_frozen_tower_and_its_features(folder: Path) -> None:
    """The weights of all three models are as many as the memory plan counts."""
    segments = [SegmentArrays.from_segment(segment) for segment in make_segments(load(folder)[1])]
    for train_tower in (False, True):
        model, _ = load(folder)
        learner = LocalLearner(model, critic=True, reference=True, train_tower=train_tower)
        assert learner._critic is not None
        assert learner._reference is not None
        for scores in (learner.score(segments, 1.0), learner.score_reference(segments, 1.0), learner.values(segments)):
            assert all(np.isfinite(score).all() for score in scores)
        cache = learner._reference.backbone._features
        distinct = {image.url for segment in segments for image in segment.images}
        assert cache.computed == len(distinct)
        backbones = (learner._policy.backbone, learner._reference.backbone, learner._critic.backbone)
        weights = {
            parameter.data_ptr(): parameter for backbone in backbones for parameter in backbone.model.parameters()
        }
        config = TrainConfig(algorithm="ppo", kl={"coef": 0.1}, vision={"train_tower": train_tower})
        plan = plan_memory(ModelSize.from_config(model.config), config, 1 << 40, on_gpu=False)
        # Of the critic's 16 bytes per weight, 12 are gradient and optimizer. Its head is smaller than the policy's.
        planned = plan.parts["weights"] + plan.parts["reference"] + plan.parts["critic"] // 4
        held = sum(weight.nbytes for weight in weights.values())
        assert planned - 4 * model.get_output_embeddings().weight.numel() <= held <= planned + 4096
        assert plan.parts["image_features"] == 2 * FEATURE_BYTES


def test_memory_plan_counts_the_tower(folder: Path) -> None:
    model, _ = load(folder)
    size = ModelSize.from_config(model.config)
    tower = sum(weight.numel() for weight in tower_parameters(model))
    assert size.tower == tower > 0
    assert size.parameters + size.tower == sum(parameter.numel() for parameter in model.parameters())
    adapters = sum(
        parameter.numel() for parameter in add_lora(load(folder)[0], 2).parameters() if parameter.requires_grad
    )
    assert 2 * size.linear_width == adapters
    frozen = plan_memory(size, TrainConfig(), 1 << 40, on_gpu=False)
    trained = plan_memory(size, TrainConfig(vision={"train_tower": True}), 1 << 40, on_gpu=False)
    assert trained.parts["optimizer"] - frozen.parts["optimizer"] == 8 * tower
    assert trained.parts["weights"] == frozen.parts["weights"]
    sharded = plan_memory(size, TrainConfig(), 1 << 40, on_gpu=False, ranks=2)
    assert sharded.parts["weights"] == 4 * size.parameters // 2 + 4 * tower  # every rank has the whole tower
    assert frozen.parts["image_features"] == 2 * trained.parts["image_features"] > 0
