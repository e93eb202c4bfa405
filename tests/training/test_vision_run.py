"""Vision agents from the first image to the checkpoint: chains, SFT and whole runs with a real model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentfly import reward, tool
from agentfly.agents import HFAgent
from agentfly.backends.engine.vision import tower_parameters
from agentfly.rollout import KeepImages
from agentfly.runs import RunDirectory
from agentfly.sft.demonstrations import record_conversation
from agentfly.sft.training import build_sft_learner, train_sft
from agentfly.training import TrainConfig
from agentfly.training.plan import TrainPlan
from agentfly.training.trainer import Trainer
from agentfly.trajectory import FailureKind, StopReason
from agentfly.types import Image, Message, Reply, Task, ToolCall
from agentfly.vision.processor import load_image_processor
from tests.vision_models import build_vision_model, picture

torch.set_num_threads(1)
ENGINE = {"backend": "transformers", "dtype": "float32", "kv_memory": 1 << 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_vision_model("qwen2_5_vl", tmp_path_factory.mktemp("model")))


@tool
def look() -> dict[str, Any]:
    """Show the next image."""
    return {"observation": "zoomed", "image": picture(90, 60, seed=7).url}


@reward
def vowels(trajectory: Any) -> float:
    """The share of vowels in everything the model wrote."""
    reply = "".join(message.text for message in trajectory.messages if message.role == "assistant")
    return sum(letter in "aeiou" for letter in reply) / max(len(reply), 12)


class LookingAgent(HFAgent):
    """An agent whose model calls `look`, whatever it writes."""

    def parse(self, text: str) -> Reply:
        return Reply(Message("assistant", text, (ToolCall("look", {}),)))


def make_agent(**settings: Any) -> LookingAgent:
    return LookingAgent(**{"template": "qwen2.5", "tools": [look], "reward": vowels, **settings})


def ask(number: int, images: int = 1) -> Task:
    pictures = [picture(56, 56, seed=number + 10 * index) for index in range(images)]
    return Task((Message("user", ("What is it? ", *pictures)),), {}, f"task{number}")


@pytest.mark.parametrize(
    "changes",
    [{"algorithm": "ppo"}, {"lora_rank": 2, "kl": {"coef": 0.01}}, {"vision": {"train_tower": True}}],
    ids=lambda changes: next(iter(changes)),
)
async def test_run_trains_on_images_and_its_checkpoint_has_the_processor(
    model: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForImageTextToText

    config = TrainConfig(
        model=model,
        template="qwen2.5",
        backend=ENGINE,
        tasks_per_step=2,
        num_chains=2,
        max_turns=2,
        sampling={"max_tokens": 6},
        optimizer={"learning_rate": 1e-3},
        micro_batch_tokens=400,
        steps=2,
        loggers=(),
        checkpoint={"every": 2},
        **changes,
    )
    plan = TrainPlan(lambda **settings: make_agent(**settings), [ask(number) for number in range(4)], config)
    await Trainer.create(plan, tmp_path / "run").run()
    directory = RunDirectory(tmp_path / "run")
    records = [record.metrics for record in directory.records() if record.metrics]
    assert len(records) == 2
    for metrics in records:
        assert np.isfinite(list(metrics.values())).all()
        assert metrics["policy/grad_norm"] > 0
        assert metrics["policy/mismatch_kl"] < 1e-4  # the learner sees what the engine saw
    for stored in directory.trajectories(2):
        (segment,) = stored.trajectory.segments
        assert len(segment.images) == 3  # of the task, and after each turn
        assert len(segment.image_positions) == 4 + 6  # the last one was never shown to the model
    saved = directory.checkpoints / "step-000002" / "model"
    assert load_image_processor(str(saved if "lora_rank" not in changes else model)).token_id == segment.image_token_id
    if "lora_rank" not in changes:
        AutoModelForImageTextToText.from_pretrained(saved)


async def test_images_that_exceed_the_context_end_the_chain(model: str) -> None:
    agent = make_agent(model_name_or_path=model, backend_config=ENGINE)
    result = await agent.run(
        [ask(0), ask(1, images=200)], max_turns=50, context_length=1000, sampling={"max_tokens": 4}
    )
    grown, large = result
    assert grown.stop is large.stop is StopReason.CONTEXT_LIMIT
    assert grown.stop.failure is FailureKind.TRUNCATION
    assert len(grown.turns) > 2
    assert not large.turns
    await agent.close()


async def test_older_images_are_left_out(model: str) -> None:
    agent = make_agent(model_name_or_path=model, backend_config=ENGINE)
    (chain,) = await agent.run([ask(0)], max_turns=4, folding=KeepImages(last=1), sampling={"max_tokens": 4})
    assert chain.stop is StopReason.MAX_TURNS
    assert [len(segment.image_positions) for segment in chain.segments] == [4, 6, 6, 6]
    await agent.close()


@pytest.mark.parametrize("train_tower", [False, True])
def test_sft_learns_from_images(model: str, train_tower: bool) -> None:
    agent = make_agent(model_name_or_path=model, backend="scripted", backend_config={"script": "unused"})
    chains = []
    for number in range(4):
        question = ask(number).messages[0]
        seen = Message("user", ("Look. ", picture(90, 60, seed=20 + number)))
        rows = (question, Message("assistant", "It"), seen, Message("assistant", f" is {number}"))
        chains.append(record_conversation(agent, Task(rows, {}, str(number))))
    assert [len(chain.segments[0].image_positions) for chain in chains] == [10] * 4
    learner = build_sft_learner(model, steps=20, learning_rate=3e-3, train_tower=train_tower)
    before = [weight.detach().clone() for weight in tower_parameters(learner.model)]
    steps = train_sft(learner, chains, steps=20, batch_size=4, prompt_loss_weight=0.1)
    assert steps[-1].loss < 0.7 * steps[0].loss
    same = [torch.equal(old, new) for old, new in zip(before, tower_parameters(learner.model), strict=True)]
    assert all(same) is not train_tower


async def test_model_without_a_processor_gets_a_note_for_each_image(model: str, tmp_path: Path) -> None:
    folder = build_vision_model("qwen2_5_vl", tmp_path)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    agent = make_agent(model_name_or_path=str(folder), backend_config=ENGINE)
    (chain,) = await agent.run([ask(0)], max_turns=2, sampling={"max_tokens": 4})
    assert chain.stop is StopReason.MAX_TURNS
    assert "(an image, which cannot be shown here)" in chain.messages[0].text
    assert not any(isinstance(part, Image) for message in chain.messages for part in message.content)
    await agent.close()
