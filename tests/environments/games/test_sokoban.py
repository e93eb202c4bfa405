"""Sokoban: generated levels, pushes, and unsolvable states."""

from __future__ import annotations

import random

import pytest

from agentfly.environments.games.sokoban import Sokoban, read_level, solve
from agentfly.errors import ConfigError, DataError
from agentfly.types import Task
from tests.environments.games.playing import answers, count_demonstrations, reset_env, winning
from tests.fakes import call

ROW = {"question": "Push.", "level": ["#####", "#@$.#", "#   #", "#####"]}
LONG = {"question": "Push.", "level": ["######", "#    #", "# $  #", "#@  .#", "######"]}


@pytest.mark.parametrize("settings", [{}, {"boxes": 2}, {"size": 7, "boxes": 3, "longest": 14}])
async def test_the_expert_solves_every_level(settings: dict[str, int]) -> None:
    rows = Sokoban.draw_tasks("train", 6 if settings.get("boxes") == 3 else 40, **settings)
    assert await count_demonstrations(Sokoban, rows) == len(rows)


def test_levels_take_the_requested_number_of_moves() -> None:
    for row in Sokoban.draw_tasks("test", 60, shortest=6, longest=9):
        way = solve(*read_level(row["level"]))
        assert way is not None
        assert 6 <= len(way) <= 9


async def test_observation_after_a_push() -> None:
    env = await reset_env(Sokoban, LONG)
    assert (await env.move("left"))["observation"] == "The way is blocked.\n######\n#____#\n#_$__#\n#@__.#\n######"
    for way in ("up", "right"):
        await env.move(way)
    assert (await env.move("right"))["observation"] == "######\n#____#\n#__@$#\n#___.#\n######"
    assert not env.over
    for way in ("up", "right"):
        await env.move(way)
    last = await env.move("down")
    assert last["observation"].endswith("Every box is on a goal.")
    assert last["ends_chain"]
    assert env.won


async def test_recipe_describes_the_room_from_the_player() -> None:
    from agentfly.environments.games.recipes.sokoban import CarelessSokoban  # draws its tasks, which takes seconds

    env = await reset_env(CarelessSokoban, LONG)
    seen = [(await env.move(way))["observation"] for way in ("left", "up", "right")]
    assert seen == [
        "The way is blocked.\nThe box is 1 up and 1 right of you, the goal 1 down and 2 right of the box. "
        "Walls near you: down left; near the box: none.",
        "The box is 1 right of you, the goal 1 down and 2 right of the box. Walls near you: left; near the box: none.",
        "The box is 1 right of you, the goal 1 down and 1 right of the box. Walls near you: none; near the box: none.",
    ]


async def test_box_in_a_corner_is_stuck() -> None:
    env = await reset_env(Sokoban, {"question": "?", "level": ["######", "#@$  #", "#   .#", "######"]})
    for _ in range(5):
        await env.move("right")
    assert not env.over
    assert env.expert() == "There is no way left."


async def test_two_boxes_cannot_be_pushed() -> None:
    env = await reset_env(Sokoban, {"question": "?", "level": ["#######", "#@$$..#", "#######"]})
    assert (await env.move("right"))["observation"].startswith("The way is blocked.")


async def test_malformed_moves_are_answered_and_claims_earn_nothing() -> None:
    strange = [call("move", direction=direction) for direction in ("pull", None, {"up": 1}, "left" * 250_000)]
    observations, chain = await answers(Sokoban, ROW, *strange, "Every box is on a goal.")
    assert len(observations) == 4
    assert all(len(observation) < 9000 for observation in observations)
    assert chain.reward == 0.0


async def test_reset_clears_the_previous_chain() -> None:
    first, second = Sokoban.draw_tasks("train", 2)
    used, fresh = await reset_env(Sokoban, first), await reset_env(Sokoban, second)
    await winning(used)
    await used.reset(Task.of(second))
    assert (used.won, used.over, used.moves) == (False, False, 0)
    assert await winning(used) == await winning(fresh)


async def test_random_policy_rarely_solves_a_level() -> None:
    blind, won = random.Random(0), 0
    for row in Sokoban.draw_tasks("test", 100):
        env = await reset_env(Sokoban, row)
        for _ in range(20):
            await env.move(blind.choice(["up", "down", "left", "right"]))
        won += env.won
    assert won < 20


def test_splits_are_fixed_and_share_no_level() -> None:
    drawn = {(split, seed): Sokoban.draw_tasks(split, 60, seed=seed) for split in ("train", "validation", "test")
             for seed in (0, 1)}  # fmt: skip
    levels = {key: {tuple(row["level"]) for row in rows} for key, rows in drawn.items()}
    for (split, _), those in levels.items():
        assert len(those) == 60
        assert not any(those & other_levels for (another, _), other_levels in levels.items() if another != split)
    assert Sokoban.draw_tasks("train", 20) == drawn["train", 0][:20]


async def test_symbols_change_the_display_only() -> None:
    class Lettered(Sokoban):
        symbols = "WPQBCGF"

    (row,), (plain,) = Lettered.draw_tasks("train", 1), Sokoban.draw_tasks("train", 1)
    assert row["level"] == plain["level"]
    assert "WWWWWW" in row["question"]
    assert "#" not in (await (await reset_env(Lettered, row)).move("up"))["observation"]


@pytest.mark.parametrize("level", [None, "#@$.#", ["#@ .#"], ["#@@$.#"], ["#@$$.#"], ["#@$.x#"], [7]])
async def test_malformed_level_is_rejected(level: object) -> None:
    with pytest.raises(DataError, match="level"):
        await reset_env(Sokoban, {"question": "?", **({"level": level} if level is not None else {})})


async def test_level_beyond_the_search_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentfly.environments.games.sokoban.MAX_POSITIONS", 1000)
    free = "#" + " " * 30 + "#"
    boxes = "#" + " $" * 8 + " " * 14 + "#"
    env = await reset_env(Sokoban, {"question": "?", "level": ["#" * 32, "#@" + "." * 8 + " " * 21 + "#", free, boxes,
                                                            free, free, "#" * 32]})  # fmt: skip
    with pytest.raises(ConfigError, match="too large"):
        env.expert()


def test_impossible_draws_are_rejected() -> None:
    with pytest.raises(ConfigError, match="boxes=9"):
        Sokoban.draw_tasks("train", 1, boxes=9)
    with pytest.raises(DataError, match="or little more"):
        Sokoban.draw_tasks("train", 1, size=5, shortest=50, longest=60)
