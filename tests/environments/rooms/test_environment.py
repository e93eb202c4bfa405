"""Rooms and walls: images follow from the task alone, and only looking at the right place shows the answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from agentfly.agents import HFAgent
from agentfly.environments.rooms import FindDigit, Rooms
from agentfly.environments.rooms.environment import digit_match
from agentfly.errors import DataError
from agentfly.models.find_digit import draw_view, quarters_of
from agentfly.models.rooms import draw_digit
from agentfly.sft.demonstrations import demonstrate
from agentfly.types import Task


async def reset(env: Rooms | FindDigit, row: dict[str, Any]) -> None:
    await env.start()
    await env.reset(Task.of(row))


def test_images_follow_from_their_arguments() -> None:
    assert draw_digit(3, "red", 5).tobytes() == draw_digit(3, "red", 5).tobytes()
    drawn = [draw_digit(digit, "red", 5).tobytes() for digit in range(10)]
    assert len(set(drawn)) == 10
    assert draw_digit(3, "red", 6).tobytes() != drawn[3]


def test_digit_is_where_the_quarters_lead() -> None:
    """The quarter of each image, but the last, with the brightest and the darkest pixels is the one to enlarge."""
    for row in FindDigit.draw_tasks("train", 20):
        path = quarters_of(row["cell"])
        for level, quarter in enumerate(path):
            pixels = np.asarray(draw_view(row, path[:level]).convert("L"), np.float64)
            halves = [quarter_pixels for half in np.split(pixels, 2) for quarter_pixels in np.split(half, 2, axis=1)]
            values = [np.sort(quarter_pixels, axis=None) for quarter_pixels in halves]
            assert 1 + int(np.argmax([quarter_values[-8:].mean() for quarter_values in values])) == quarter
            assert 1 + int(np.argmin([quarter_values[:8].mean() for quarter_values in values])) == quarter
        assert draw_view(row, path).tobytes() == draw_view(row, path).tobytes()


async def test_room_shows_its_own_digit_only() -> None:
    (row,) = Rooms.draw_tasks("train", 1)
    env = Rooms()
    await reset(env, row)
    first = await env.open_room(1)
    assert first == await env.open_room(1)
    assert first["observation"] == ""
    assert first["image"] != (await env.open_room(2))["image"]
    assert await env.open_room(10) == {"observation": "There is no such room."}
    assert await env.open_room(-1) == {"observation": "There is no such room."}


@pytest.mark.parametrize(("env_class", "turns"), [(Rooms, 2), (FindDigit, 3)])
async def test_expert_looks_at_the_right_place_and_answers(env_class: type[Rooms | FindDigit], turns: int) -> None:
    tasks = env_class.draw_tasks("test", 12, seed=4)
    agent = HFAgent(
        tools=[env_class], reward=digit_match, template="chatml", backend="scripted", backend_config={"script": "-"}
    )
    demonstrations = await demonstrate(agent, tasks, threshold=1, max_turns=3)
    await agent.close()
    assert len(demonstrations.accepted) == 12
    assert {len(chain.turns) for chain in demonstrations.accepted} == {turns}


async def test_image_is_enlarged_twice_at_most() -> None:
    (row,) = FindDigit.draw_tasks("train", 1)
    env = FindDigit()
    await reset(env, row)
    assert await env.enlarge(0) == await env.enlarge(5) == {"observation": "There is no such quarter."}
    first = await env.enlarge(1)
    assert first["image"] != (await env.enlarge(1))["image"]
    assert await env.enlarge(1) == {"observation": "It cannot be enlarged further."}


@pytest.mark.parametrize(
    "change",
    [{"digits": [12]}, {"digits": []}, {"colors": ["mauve"] * 11}, {"target": 10}, {"target": None}, {"seed": -1}],
)
async def test_bad_columns_are_rejected(change: dict[str, Any]) -> None:
    (row,) = Rooms.draw_tasks("train", 1)
    with pytest.raises(DataError, match="needs the columns digits"):
        await reset(Rooms(), {**row, **change})


@pytest.mark.parametrize("change", [{"digit": 10}, {"cell": 16}, {"color": "mauve"}, {"seed": None}])
async def test_bad_walls_are_rejected(change: dict[str, Any]) -> None:
    (row,) = FindDigit.draw_tasks("train", 1)
    with pytest.raises(DataError, match="needs the columns digit "):
        await reset(FindDigit(), {**row, **change})


def test_answers_are_balanced() -> None:
    # A policy that never looks is right in about one of ten tasks.
    answers = Counter(row["answer"] for row in Rooms.draw_tasks("train", 300))
    assert max(answers.values()) < 60
