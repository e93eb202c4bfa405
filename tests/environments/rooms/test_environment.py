"""Rooms and tiles: images follow from the task alone, and only looking at the right place shows the answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.demonstrations import demonstrate
from agentfly.environments.rooms import Rooms, Tiles
from agentfly.environments.rooms.environment import digit_match
from agentfly.errors import ConfigError, DataError
from agentfly.models.rooms import COLORS, draw_digit, draw_tiles
from agentfly.types import Task


async def reset(env: Rooms | Tiles, row: dict[str, Any]) -> None:
    await env.start()
    await env.reset(Task.of(row))


def test_images_follow_from_their_arguments() -> None:
    assert draw_digit(3, "red", 5).tobytes() == draw_digit(3, "red", 5).tobytes()
    drawn = [draw_digit(digit, "red", 5).tobytes() for digit in range(10)]
    assert len(set(drawn)) == 10
    assert draw_digit(3, "red", 6).tobytes() != drawn[3]


def test_tiles_have_their_colors() -> None:
    image = draw_tiles(list(COLORS), 3, 1)
    for place, color in enumerate(COLORS.values()):
        row, column = divmod(place, 3)
        tile = image.crop((16 * column, 16 * row, 16 * column + 16, 16 * row + 16)).resize((1, 1))
        pixel = tile.getpixel((0, 0))
        assert isinstance(pixel, tuple)
        assert all(abs(seen - meant) < 60 for seen, meant in zip(pixel, color, strict=True))


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


@pytest.mark.parametrize("env_class", [Rooms, Tiles])
async def test_expert_looks_at_the_right_place_and_answers(env_class: type[Rooms | Tiles]) -> None:
    tasks = env_class.draw_tasks("test", 12, seed=4)
    agent = HFAgent(
        tools=[env_class], reward=digit_match, template="chatml", backend="scripted", backend_config={"script": "-"}
    )
    demonstrations = await demonstrate(agent, tasks, threshold=1, max_turns=3)
    await agent.close()
    assert len(demonstrations.accepted) == 12
    assert {len(chain.turns) for chain in demonstrations.accepted} == {2}


async def test_tile_by_row_and_column() -> None:
    (row,) = Tiles.draw_tasks("train", 1, size=2)
    env = Tiles()
    await reset(env, row)
    seen = [(await env.click_tile(y, x))["image"] for y in (1, 2) for x in (1, 2)]
    assert len(set(seen)) == 4
    for place in ((0, 1), (1, 3), (3, 1)):
        assert await env.click_tile(*place) == {"observation": "There is no such tile."}
    with pytest.raises(ConfigError, match="2 to 3 rows"):
        Tiles.draw_tasks("train", 1, size=4)


@pytest.mark.parametrize(
    "change",
    [{"digits": [12]}, {"digits": []}, {"colors": ["mauve"] * 11}, {"target": 10}, {"target": None}, {"seed": -1}],
)
async def test_bad_columns_are_rejected(change: dict[str, Any]) -> None:
    (row,) = Rooms.draw_tasks("train", 1)
    with pytest.raises(DataError, match="needs the columns digits"):
        await reset(Rooms(), {**row, **change})


def test_answers_are_balanced() -> None:
    # A policy that never looks is right in about one of ten tasks.
    answers = Counter(row["answer"] for row in Rooms.draw_tasks("train", 300))
    assert max(answers.values()) < 60
