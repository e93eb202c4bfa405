"""Questions about images: drawn scenes, the zoom tool, the expert, the reward, and images of one's own."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image as Pillow

from agentfly.agents import HFAgent
from agentfly.environments.image_qa import ImageQA
from agentfly.environments.image_qa.environment import KINDS, image_qa_match
from agentfly.environments.image_qa.scenes import HEIGHT, WIDTH, draw_scene
from agentfly.errors import ConfigError, DataError
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Image, Task
from agentfly.vision.images import open_image


async def reset(row: dict[str, Any]) -> ImageQA:
    env = ImageQA()
    await env.start()
    await env.reset(Task.of(row))
    return env


def open_result(result: dict[str, Any]) -> Pillow.Image:
    return open_image(result["image"])


def test_same_seed_draws_the_same_bytes() -> None:
    assert ImageQA.draw_tasks("train", 6, seed=3) == ImageQA.draw_tasks("train", 6, seed=3)
    assert ImageQA.draw_tasks("train", 2, seed=3)[0]["image"] != ImageQA.draw_tasks("train", 2, seed=4)[0]["image"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_varied_questions_and_evidence_inside_the_image(kind: str) -> None:
    scenes = [draw_scene(kind, seed) for seed in range(12)]
    assert len({scene.question for scene in scenes}) > 3
    assert len({scene.answer for scene in scenes}) > 4
    for scene in scenes:
        left, top, right, bottom = scene.evidence
        assert left < right
        assert top < bottom
        # What shows the answer is there: the evidence is not blank.
        region = scene.image.crop(
            (int(max(0, left)), int(max(0, top)), int(min(WIDTH, right)), int(min(HEIGHT, bottom)))
        )
        assert len(region.getcolors(maxcolors=1 << 20) or ()) > 4


async def test_zoom_shows_the_part_in_full_resolution() -> None:
    env = await reset({"question": "?", "kind": "table", "seed": 5})
    result = await env.zoom(0, 0, 500, 500)
    assert result["pixels"] == [WIDTH // 2, HEIGHT // 2]
    # Half of the scene has as many pixels as the tool shows, so nothing is scaled.
    assert env.scene is not None
    assert open_result(result).tobytes() == env.scene.image.crop((0, 0, WIDTH // 2, HEIGHT // 2)).tobytes()
    tiny = await env.zoom(999, 999, 1000, 1000)
    assert tiny["pixels"] == [8, 8]
    assert max(open_result(tiny).size) == ImageQA.max_edge


@pytest.mark.parametrize(
    "box", [(500, 0, 400, 900), (0, 0, 0, 10), (-1, 0, 10, 10), (0, 0, 1001, 10), (0, 0, 10**400, 1)]
)
async def test_impossible_parts_are_answered(box: tuple[int, int, int, int]) -> None:
    env = await reset({"question": "?", "kind": "map", "seed": 5})
    result = await env.zoom(*box)
    assert "left < right" in result["observation"]
    assert "image" not in result


async def test_expert_solves_tasks_of_every_kind_through_the_tool() -> None:
    tasks = [row for kind in KINDS for row in ImageQA.draw_tasks("test", 3, kinds=[kind])]
    agent = HFAgent(
        tools=[ImageQA], reward=image_qa_match, template="chatml", backend="scripted", backend_config={"script": "-"}
    )
    demonstrations = await demonstrate(agent, tasks, threshold=1, max_turns=3)
    await agent.close()
    assert len(demonstrations.accepted) == len(tasks)
    for chain in demonstrations.accepted:
        assert [call.name for turn in chain.turns for call in turn.calls] == ["zoom"]


async def test_an_image_of_the_task_can_be_zoomed() -> None:
    buffer = io.BytesIO()
    Pillow.new("L", (40, 10), 200).save(buffer, format="PNG")
    env = await reset({"question": "How bright?", "image": Image.of(buffer.getvalue()).url, "answer": "200"})
    result = await env.zoom(0, 0, 1000, 1000)
    assert open_result(result).size == (384, 96)
    with pytest.raises(ConfigError, match="expert"):
        env.expert()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no column 'image'"),
        ({"kind": "painting", "seed": 1}, "a scene has a kind"),
        ({"kind": "map"}, "a scene has a kind"),
        ({"image": "https://example.com/a.png"}, "not a data: URI"),
        ({"image": "data:image/png;base64,!!!"}, "cannot be decoded"),
        ({"image": "data:image/png;base64," + base64.b64encode(b"\x89PNG no more").decode()}, "cannot be decoded"),
    ],
)
async def test_bad_tasks_are_rejected(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        await reset({"question": "?", **row})


async def test_a_decompression_bomb_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="cannot be decoded"):
        await reset({"question": "?", "image": Pillow.new("RGB", (40, 40))})


@pytest.mark.parametrize(
    ("prediction", "answer", "reward"),
    [
        ("54", "54", 1.0),
        ("54.0", "54", 1.0),
        ("1,234", "1234", 1.0),
        ("<answer> Alden. </answer>", "Alden", 1.0),
        ("22 nov 2019", "22 Nov 2019", 1.0),
        ("5.4", "54", 0.0),
        ("It is 54", "54", 0.0),
        ("", "54", 0.0),
    ],
)
async def test_reward_compares_exactly(prediction: str, answer: str, reward: float) -> None:
    assert image_qa_match(prediction=prediction, answer=answer) == reward
