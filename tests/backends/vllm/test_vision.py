"""Vision models in vLLM: prompts, log-probabilities and weight updates against a plain forward pass.

The models have random weights. Without torchvision it is an Idefics3 only: vLLM loads other families with their video
processors, which need it. With torchvision it is a Qwen2.5-VL as well, and on a GPU other families, in bfloat16.
"""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
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
from agentfly.trajectory import StopReason
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

pytestmark = needs_vision
torch.set_num_threads(1)


ON_GPU = torch.cuda.is_available()
MODELS = ["qwen2_5_vl-float32", "qwen2_5_vl-bfloat16", "qwen3_vl-bfloat16", "smolvlm-bfloat16", "internvl-bfloat16"]
if not ON_GPU:
    MODELS = ["idefics3-float32", *(MODELS[:1] if find_spec("torchvision") else [])]


@pytest.fixture(scope="module", params=MODELS)
def settings(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Model type and dtype."""
    family, _, dtype = request.param.partition("-")
    return family, dtype


@pytest.fixture(scope="module")
def folder(settings: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM on a CPU needs heads of 32 numbers, and a head of its own to take new weights
    shape = {"hidden_size": 128, "tie_word_embeddings": ON_GPU}
    return build_vision_model(settings[0], tmp_path_factory.mktemp("model"), **shape)


@pytest.fixture(scope="module")
def model(folder: Path, settings: tuple[str, str]) -> Any:
    device = torch.device("cuda" if ON_GPU else "cpu")
    return load_model(str(folder), device, getattr(torch, settings[1]))


@pytest.fixture(scope="module")
def template(folder: Path) -> Template:
    return open_template(folder)


@pytest.fixture(scope="module")
def backend(folder: Path, template: Template, settings: tuple[str, str]) -> Iterator[VLLMBackend]:
    # a short start; other tests use the GPU at the same time
    engine = {"enforce_eager": True, "gpu_memory_utilization": 0.1, "limit_mm_per_prompt": {"image": 4, "video": 0}}
    backend = backend_of(str(folder), dtype=settings[1], engine=engine if ON_GPU else {})
    backend.attach(template)
    yield backend
    asyncio.run(backend.close())


@torch.inference_mode()
def compare_scores(model: Any, template: Template, segment: Segment) -> np.ndarray:
    """Differences between the log-probabilities of a plain forward pass and those of vLLM."""
    scores: np.ndarray = score_with_pixels(model, template, segment).cpu().numpy()
    return np.abs(scores - segment.logprobs[segment.mask])


def assert_scores_equal(model: Any, template: Template, segment: Segment) -> None:
    difference = compare_scores(model, template, segment)
    print(f"{model.config.model_type} {model.dtype}: mean {difference.mean():.2e}, max {difference.max():.2e}")
    if not ON_GPU:
        assert difference.max() < 1e-5
    elif model.dtype == torch.float32:
        assert difference.max() < 1e-2  # products in TF32
    else:
        assert difference.mean() < 0.05  # the rounding of bfloat16; a wrong position or feature costs 0.2 and more


async def sample_chains(backend: VLLMBackend, template: Template) -> list[Segment]:
    """Five chains, without those that ended because the random model sampled an image placeholder."""
    chains = (sample_chain(backend, template, number) for number in range(5))
    results = await asyncio.gather(*chains, return_exceptions=True)
    faults = [segment_or_fault for segment_or_fault in results if not isinstance(segment_or_fault, Segment)]
    assert all("sampled an image placeholder" in str(fault) for fault in faults), faults
    assert len(faults) <= 2
    return [segment_or_fault for segment_or_fault in results if isinstance(segment_or_fault, Segment)]


async def test_chains_with_images_equal_a_plain_forward_pass(
    backend: VLLMBackend, template: Template, model: Any
) -> None:
    """Three turns with an image in the question and in each tool result. Every turn compares vLLM's prompt to ours."""
    assert backend.supports_images
    for segment in await sample_chains(backend, template):
        assert len(segment.images) == 3
        assert_scores_equal(model, template, segment)


@pytest.mark.parametrize("device", ["cuda", "cpu"] if ON_GPU else ["cpu"])
async def test_weight_update_reaches_tower_and_language_model(
    backend: VLLMBackend, template: Template, model: Any, device: str
) -> None:
    """All weights of the vision tower and the language model change; features and prefixes of the old ones go.

    They have their names in memory, which for Qwen2.5-VL are not those of the checkpoint. From a GPU they are passed by
    CUDA IPC, from a CPU through files.
    """
    version = backend.weight_version
    first = (await sample_chains(backend, template))[0]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(number)
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.05).to(parameter))
        sent = ((name, parameter.to(device)) for name, parameter in model.named_parameters())
        await backend.update_weights(sent, version + 1)
        for segment in await sample_chains(backend, template):
            assert set(segment.weight_versions[segment.mask]) == {version + 1}
            assert_scores_equal(model, template, segment)
        assert compare_scores(model, template, first).max() > (0.2 if ON_GPU else 1e-2)
    finally:
        model.load_state_dict(weights, strict=False)
        await backend.update_weights(((name, parameter.to(device)) for name, parameter in weights.items()), version + 2)


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
        precision="float32",  # where bfloat16 is faster, the learner would differ from vLLM by more
        zero_variance="keep",
        steps=3,
        loggers=(),
    )
    tasks = [Task((Message("user", ("What? ", picture(56, 56, number))),), {}, f"task{number}") for number in range(4)]
    plan = TrainPlan(lambda **settings: LookingAgent(**settings, tools=[look], reward=num_letters), tasks, config)
    await Trainer.create(plan, tmp_path / "run").run()
    directory = RunDirectory(tmp_path / "run")
    steps = [record.metrics for record in directory.records() if record.metrics]
    assert len(steps) == 3
    assert max(step_metrics["policy/mismatch_max"] for step_metrics in steps) < 1e-3
    assert steps[0]["policy/grad_norm"] > 0
    chains = [stored.trajectory for stored in directory.trajectories(3)]
    complete = [chain for chain in chains if chain.stop is StopReason.MAX_TURNS]
    assert complete
    failures = [failure.message for chain in chains for failure in chain.failures]
    assert all("sampled an image placeholder" in failure for failure in failures), failures
    for chain in complete:
        (segment,) = chain.segments
        assert len(segment.images) == 3  # of the task, and after each turn
        assert set(segment.weight_versions[segment.mask]) == {2}
