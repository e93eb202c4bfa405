"""The tiny vision model: demonstrations, training examples, and a build that engine and learner can use."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the tiny vision model is made with torch")
pytest.importorskip("PIL", reason="rooms are drawn with Pillow")

from agentfly.agents import HFAgent  # noqa: E402
from agentfly.cli.recipes import find_recipe  # noqa: E402
from agentfly.cli.train import plan_recipe  # noqa: E402
from agentfly.environments.rooms import FindDigit, Rooms  # noqa: E402
from agentfly.models import find_digit, rooms, tiny_vision  # noqa: E402
from agentfly.models.rooms import demonstrations, draw_digit  # noqa: E402
from agentfly.models.tiny import IGNORE_INDEX  # noqa: E402
from agentfly.runs import RunDirectory  # noqa: E402
from agentfly.sft.demonstrations import record_conversation  # noqa: E402
from agentfly.training.trainer import Trainer  # noqa: E402
from agentfly.types import Task  # noqa: E402
from agentfly.vision.processor import load_image_processor  # noqa: E402

STEPS = 2
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after a few steps of its training."""
    folder = tmp_path_factory.mktemp("tiny-vision")
    tiny_vision.build(folder, folder, steps=STEPS)
    return folder


def test_build_is_deterministic(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        tiny_vision.build(tmp_path / name, tmp_path, steps=STEPS, seed=seed)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "same").iterdir()}
    assert files["model.safetensors"] != (tmp_path / "other" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("task", "env_class"), [(rooms, Rooms), (find_digit, FindDigit)])
def test_examples_equal_recorded_conversations(folder: Path, task: Any, env_class: Any) -> None:
    """Tokens and mask are those of a chain of the agent, and the pixels those of the model's processor."""
    agent = HFAgent(str(folder), tools=[env_class], backend="scripted", backend_config={"script": "-"})
    processor = load_image_processor(str(folder))
    examples = list(task.demonstrations(12, seed=3))
    assert {len(demo.calls) for demo in examples} == ({0, 1} if task is rooms else {0, 2})
    for demo, example in zip(examples, tiny_vision.build_examples(folder, 12, seed=3, task=task), strict=True):
        chain = record_conversation(agent, Task.of(demo.row))
        (segment,) = chain.segments
        assert example.tokens == segment.tokens.tolist()
        assert [label != IGNORE_INDEX for label in example.labels] == segment.mask.tolist()
        assert all(label in (token, IGNORE_INDEX) for token, label in zip(example.tokens, example.labels, strict=True))
        pixels = [processor.encode(image).inputs["pixel_values"][0, 0] for image in segment.images]
        assert np.array_equal(np.stack(pixels), example.images)


async def test_engine_shows_the_images_and_reads_calls(folder: Path) -> None:
    """An untrained model answers anything, but other images change what it samples."""
    agent = HFAgent(str(folder), tools=[Rooms], backend="transformers", backend_config={"kv_memory": 1 << 26})
    rows = Rooms.draw_tasks("test", 2)
    rows[1] = {**rows[0], "id": "other", "image": rows[1]["image"]}
    result = await agent.run(rows, max_turns=1, sampling={"max_tokens": 4, "temperature": 0.0})
    await agent.close()
    first, second = (chain.segments[0] for chain in result.trajectories)
    assert first.tokens[: len(first.spans[0])].tolist() == second.tokens[: len(second.spans[0])].tolist()
    assert first.spans[1].logprobs[0] != second.spans[1].logprobs[0]


async def test_recipe_trains_one_step(folder: Path, tmp_path: Path) -> None:
    small = {"model": str(folder), "steps": 1, "tasks_per_step": 2, "num_chains": 2, "checkpoint.every": 1}
    plan = plan_recipe(find_recipe("rooms"), {**small, "zero_variance": "keep"})
    await Trainer.create(replace(plan, eval_tasks=plan.eval_tasks[:2]), tmp_path / "run").run()
    (record,) = [record for record in RunDirectory(tmp_path / "run").records() if record.step == 1]
    assert record.eval is not None
    assert record.metrics["policy/tokens"] > 0


def test_schemas_equal_those_of_the_environments_tools() -> None:
    assert Rooms.open_room.schema == rooms.TOOL_SCHEMA
    assert FindDigit.enlarge.schema == find_digit.TOOL_SCHEMA


@pytest.mark.parametrize(("task", "tool", "choices"), [(rooms, "open_room", 10), (find_digit, "enlarge", 4)])
def test_demonstrations_are_seeded_and_act_in_many_ways(task: Any, tool: str, choices: int) -> None:
    examples = list(task.demonstrations(400, 3))
    assert sum(task.STRATEGIES.values()) == 100
    acting = [demo for demo in examples if demo.calls]
    assert {demo.tool for demo in acting} == {tool}
    assert 100 < len(acting) < 250
    assert len({str(arguments) for demo in acting for arguments in demo.calls}) == choices
    assert {demo.question for demo in examples if not demo.calls} > {demo.question for demo in acting}
    row = acting[0].row
    assert row == next(demo.row for demo in task.demonstrations(400, 3) if demo.calls)
    turns = ["assistant", "tool"] * len(acting[0].calls)
    assert [message.role for message in Task.of(row).messages] == ["user", *turns, "assistant"]


def test_most_walks_miss_the_digit() -> None:
    acting = [demo for demo in find_digit.demonstrations(300, 5) if len(demo.calls) == find_digit.DEPTH]
    bright = [np.asarray(demo.observations[-1].convert("L")).max() > 240 for demo in acting]
    assert 0.08 < np.mean(bright) < 0.3


def test_most_demonstrations_open_another_room() -> None:
    """The number in the first image is found by comparing it with each digit, at all places that a digit may have."""
    clean = [np.asarray(draw_digit(digit, "black", 0).convert("L")) > 160 for digit in range(10)]
    moved = [[np.roll(mask, (y, x), (0, 1)) for y in range(-4, 5) for x in range(-4, 5)] for mask in clean]
    acting = [demo for demo in demonstrations(100, 5) if demo.calls]
    right = 0
    for demo in acting:
        bright = np.asarray(demo.image.convert("L"), np.float64)
        likeness = [max(bright[mask].mean() - bright[~mask].mean() for mask in masks) for masks in moved]
        right += demo.calls[0]["room"] == int(np.argmax(likeness))
    assert 0.1 < right / len(acting) < 0.45
