"""Vision models in the engine, against a plain forward pass of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentfly.backends.base import Request
from agentfly.backends.engine import EngineBackend
from agentfly.backends.engine import vision as engine_vision
from agentfly.backends.engine.loading import load_model
from agentfly.errors import BackendFault, ConfigError
from agentfly.rollout.history import Transcript
from agentfly.segment import Author, Segment
from agentfly.templates.template import Template
from agentfly.types import Message, Sampling
from agentfly.vision.processor import load_image_processor
from tests.vision_models import (
    FAMILIES,
    build_vision_model,
    needs_vision,
    open_template,
    picture,
    sample_chain,
    sample_turn,
    score_with_pixels,
)

pytestmark = needs_vision
torch.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return build_vision_model(family, tmp_path_factory.mktemp(family))


def open_parts(folder: Path, **settings: Any) -> tuple[EngineBackend, Template]:
    template = open_template(folder)
    backend = EngineBackend(str(folder), **{"dtype": "float32", "kv_memory": 32 << 20, **settings})
    backend.attach(template)
    return backend, template


async def sample_chains(backend: EngineBackend, template: Template) -> list[Segment]:
    return list(await asyncio.gather(*(sample_chain(backend, template, number) for number in range(5))))


@torch.inference_mode()
def score_plainly(model: Any, template: Template, segment: Segment) -> np.ndarray:
    scores: np.ndarray = score_with_pixels(model, template, segment).cpu().numpy()
    return scores


def without_sampled_images(segment: Segment) -> bool:
    return not (segment.tokens[segment.mask] == segment.image_token_id).any()


async def test_logprobs_equal_a_plain_forward_pass(folder: Path) -> None:
    backend, template = open_parts(folder, max_batch_tokens=40, max_rows=8)  # chunks end inside images
    assert backend.supports_images
    segments = await sample_chains(backend, template)
    compared = [segment for segment in segments if without_sampled_images(segment)]
    assert len(compared) >= 3
    for segment in compared:
        difference = np.abs(score_plainly(backend.model, template, segment) - segment.logprobs[segment.mask]).max()
        assert difference < 1e-5
    assert backend._runner.features.computed == 4 + 5  # each distinct image once
    await backend.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA graphs")
async def test_logprobs_with_cuda_graphs_equal_a_plain_forward_pass(folder: Path) -> None:
    backend, template = open_parts(folder, device="cuda", dtype="bfloat16", max_batch_tokens=40, max_rows=8)
    segments = await sample_chains(backend, template)
    compared = [segment for segment in segments if without_sampled_images(segment)]
    assert len(compared) >= 3
    for segment in compared:
        difference = np.abs(score_plainly(backend.model, template, segment) - segment.logprobs[segment.mask])
        assert difference.mean() < 0.05  # the rounding of bfloat16; a wrong position or feature costs 0.2 and more
    await backend.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_attention_over_all_windows_at_once_gives_the_features_of_one_window_after_the_other(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def attend_naively(query: Any, key: Any, value: Any, lengths: Any, *_: Any) -> Any:
        calls.append(len(lengths) - 1)
        sequences = zip(*(tensor.split(lengths.diff().tolist()) for tensor in (query, key, value)), strict=True)
        return torch.cat([scaled_dot_product(*sequence) for sequence in sequences])

    def scaled_dot_product(query: Any, key: Any, value: Any) -> Any:
        weights = torch.einsum("qhw,khw->hqk", query, key) / query.shape[-1] ** 0.5
        return torch.einsum("hqk,khw->qhw", weights.softmax(-1), value)

    folder = build_vision_model(family, tmp_path)
    model = load_model(str(folder), torch.device("cpu"), torch.float32).eval()
    processor = load_image_processor(str(folder))
    images = [processor.encode(picture(224, 168, seed)) for seed in range(2)]
    monkeypatch.setattr(engine_vision, "varlen_attn", attend_naively)  # torch has it on GPUs only
    with torch.no_grad():
        expected = engine_vision.compute_features(model, images)
        assert not calls
        model.config.vision_config._attn_implementation = engine_vision.VARLEN_ATTENTION
        features = engine_vision.compute_features(model, images)
    assert max(calls) > 1
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


async def test_images_of_one_size_are_not_confused_and_features_follow_the_weights(folder: Path) -> None:
    backend, template = open_parts(folder)

    async def ask(seed: int) -> list[float]:
        transcript = Transcript(template)
        transcript.begin([Message("user", ("What is it? ", picture(56, 56, seed), "Look."))], Author.TASK, turn=0)
        await sample_turn(backend, template, transcript, "0")
        return transcript.close()[0].logprobs.tolist()

    first, second = await ask(1), await ask(2)
    assert first != second
    assert backend._runner.features.computed == 2
    assert np.allclose(await ask(1), first, atol=1e-5)
    assert backend._runner.features.computed == 2
    tower = next(name for name in backend.weights if "vision" in name or "visual" in name)
    weight = backend.weights[tower].detach().clone()
    await backend.update_weights([(tower, torch.randn_like(weight))], 1)
    changed = await ask(1)
    assert backend._runner.features.computed == 3
    assert not np.allclose(changed, first, atol=1e-4)
    await backend.close()


async def test_wrong_image_requests_are_rejected(tmp_path: Path) -> None:
    folder = build_vision_model("qwen2_5_vl", tmp_path)
    backend, template = open_parts(folder)
    prompt = template.start([Message("user", (picture(56, 56), "?"))])
    with pytest.raises(BackendFault, match="image tokens"):
        await backend.generate(Request(prompt, Sampling(max_tokens=2), images=(picture(56, 56),), image_positions=[3]))
    await backend.close()
    blind = EngineBackend(backend.model, kv_memory=1 << 22)  # without a name, its processor is unknown
    assert not blind.supports_images
    with pytest.raises(ConfigError, match="takes no images"):
        await blind.generate(Request(prompt, Sampling(max_tokens=2), images=(picture(56, 56),)))
    await blind.close()
