"""A vision model in vLLM on a CPU: prompts, log-probabilities and weight updates against a plain forward pass.

The model is an Idefics3 with random weights: vLLM loads other families with their video processors, which need
torchvision.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agentfly import reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.base import Request
from agentfly.backends.engine.loading import load_model
from agentfly.backends.vllm import VLLMBackend
from agentfly.errors import BackendFault
from agentfly.models import tiny_vision
from agentfly.runs import RunDirectory
from agentfly.segment import Segment
from agentfly.templates.template import Template
from agentfly.training import TrainConfig
from agentfly.training.plan import TrainPlan
from agentfly.training.trainer import Trainer
from agentfly.types import Message, Reply, Sampling, Task, ToolCall
from tests.backends.vllm.small import backend_of
from tests.vision_models import (
    build_vision_model,
    needs_vision,
    open_template,
    picture,
    sample_chain,
    score_with_pixels,
)

pytestmark = [pytest.mark.vllm, needs_vision]
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM on a CPU needs heads of 32 numbers, and a head of its own to take new weights
    shape = {"hidden_size": 128, "tie_word_embeddings": False}
    return build_vision_model("idefics3", tmp_path_factory.mktemp("model"), **shape)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(str(folder), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def template(folder: Path) -> Template:
    return open_template(folder)


@pytest.fixture(scope="module")
def backend(folder: Path, template: Template) -> Iterator[VLLMBackend]:
    backend = backend_of(str(folder))
    backend.attach(template)
    yield backend
    asyncio.run(backend.close())


@torch.inference_mode()
def assert_scores_equal(model: Any, template: Template, segment: Segment) -> None:
    difference = score_with_pixels(model, template, segment).numpy() - segment.logprobs[segment.mask]
    assert np.abs(difference).max() < 1e-5


async def test_chains_with_images_equal_a_plain_forward_pass(
    backend: VLLMBackend, template: Template, model: Any
) -> None:
    """Three turns with an image in the question and in each tool result. Every turn compares vLLM's prompt to ours."""
    assert backend.supports_images
    segments = await asyncio.gather(*(sample_chain(backend, template, number) for number in range(5)))
    for segment in segments:
        assert len(segment.images) == 3
        assert_scores_equal(model, template, segment)


async def test_weight_update_reaches_tower_and_language_model(
    backend: VLLMBackend, template: Template, model: Any
) -> None:
    """All weights of the vision tower and the language model change; features and prefixes of the old ones go."""
    before = await sample_chain(backend, template, 0)
    weights = {name: each.detach().clone() for name, each in model.named_parameters()}
    try:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        await backend.update_weights(model.named_parameters(), 1)
        after = await sample_chain(backend, template, 0)
        assert set(after.weight_versions[after.mask]) == {1}
        assert_scores_equal(model, template, after)
        with torch.inference_mode():
            difference = score_with_pixels(model, template, before).numpy() - before.logprobs[before.mask]
        assert np.abs(difference).max() > 1e-2
    finally:
        model.load_state_dict(weights, strict=False)
        await backend.update_weights(weights.items(), 2)


async def test_wrong_prompts_fail_their_turn(backend: VLLMBackend, template: Template) -> None:
    image = picture(56, 56)
    prompt = template.start([Message("user", (image, "?"))])
    assert template.image_processor is not None
    positions = [at for at, token in enumerate(prompt) if token == template.image_processor.token_id]
    with pytest.raises(BackendFault, match="are not those of its image"):
        await backend.generate(
            Request(prompt, Sampling(max_tokens=2), images=(picture(200, 56),), image_positions=positions)
        )
    sampled = [*prompt, template.image_processor.token_id]
    with pytest.raises(BackendFault, match="sampled an image placeholder"):
        await backend.generate(Request(sampled, Sampling(max_tokens=2), images=(image,), image_positions=positions))


# ── training ──


@tool
def look() -> dict[str, Any]:
    """Show the next image."""
    return {"observation": "zoomed", "image": picture(90, 60, seed=7).url}


@reward
def num_letters(trajectory: Any) -> float:
    """How many letters the model wrote."""
    return float(sum(len(message.text) for message in trajectory.messages if message.role == "assistant"))


class LookingAgent(HFAgent):
    """An agent whose model calls `look`, whatever it writes."""

    def parse(self, text: str) -> Reply:
        return Reply(Message("assistant", text, (ToolCall("look", {}),)))


@pytest.mark.timeout(600)
async def test_run_trains_on_images_of_tasks_and_tools(tmp_path: Path) -> None:
    """Every step, the learner scores what vLLM sampled with the weights of the last update."""
    model = tmp_path / "model"
    model.mkdir()
    tiny_vision.build(model, tmp_path, steps=2)
    weights = load_file(model / "model.safetensors")  # vLLM on a CPU cannot update a head tied to the embeddings
    weights["lm_head.weight"] = weights["model.text_model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    config_file = model / "config.json"
    config_file.write_text(
        config_file.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    config = TrainConfig(
        model=str(model),
        backend={"backend": "vllm", "dtype": "float32", "kv_memory": 1 << 26},
        tasks_per_step=2,
        num_chains=4,
        max_turns=2,
        sampling={"max_tokens": 8},
        optimizer={"learning_rate": 1e-2},
        zero_variance="keep",
        steps=3,
        loggers=(),
    )
    tasks = [Task((Message("user", ("What? ", picture(56, 56, number))),), {}, f"task{number}") for number in range(4)]
    plan = TrainPlan(lambda **settings: LookingAgent(**settings, tools=[look], reward=num_letters), tasks, config)
    await Trainer(plan, tmp_path / "run").run()
    directory = RunDirectory(tmp_path / "run")
    steps = [record.metrics for record in directory.records() if record.metrics]
    assert len(steps) == 3
    assert all(each["policy/mismatch_max"] < 1e-3 for each in steps)
    assert steps[0]["policy/grad_norm"] > 0
    for stored in directory.trajectories(3):
        (segment,) = stored.trajectory.segments
        assert len(segment.images) == 3  # of the task, and after each turn
        assert set(segment.weight_versions[segment.mask]) == {2}
