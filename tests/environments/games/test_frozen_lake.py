"""The frozen lake: generated tasks, steps, and chains without a reward."""

from __future__ import annotations

import random

import pytest

from agentfly.environments.games.frozen_lake import FrozenLake, compute_distances
from agentfly.environments.games.game import find_symbols
from agentfly.errors import ConfigError, DataError
from tests.environments.games.playing import answers, count_demonstrations, reset_env, winning
from tests.fakes import call

ROW = {"question": "Cross.", "lake": ["SFH", "HFF", "FHG"]}


async def test_the_expert_crosses_64_lakes_at_once() -> None:
    assert await count_demonstrations(FrozenLake, FrozenLake.draw_tasks("train", 64)) == 64


async def test_observations_along_a_path() -> None:
    env = await reset_env(FrozenLake, ROW)
    seen = [(await env.move(way))["observation"] for way in ("up", "right", "down", "right")]
    assert seen == ["PFH\nHFF\nFHG", "SPH\nHFF\nFHG", "SFH\nHPF\nFHG", "SFH\nHFP\nFHG"]
    last = await env.move("down")
    assert last == {
        "observation": "SFH\nHFF\nFHP\nYou are at the goal.", "won": True, "score": 1.0, "ends_chain": True
    }  # fmt: skip


async def test_recipe_describes_the_lake_from_the_player() -> None:
    from agentfly.environments.games.recipes.frozen_lake import CarelessLake  # draws its tasks, which takes seconds

    env = await reset_env(CarelessLake, ROW)
    seen = [(await env.move(way))["observation"] for way in ("right", "down", "right", "down")]
    assert seen == [
        "The goal is 2 down and 1 right. Around you: up edge, down ice, left ice, right hole.",
        "The goal is 1 down and 1 right. Around you: up ice, down hole, left hole, right ice.",
        "The goal is 1 down. Around you: up hole, down goal, left ice, right edge.",
        "The goal is here. Around you: up ice, down edge, left hole, right edge.\nYou are at the goal.",
    ]


async def test_hole_ends_the_game() -> None:
    observations, chain = await answers(FrozenLake, ROW, call("move", direction="down"), call("move", direction="up"))
    assert observations == ["SFH\nPFF\nFHG\nYou fell into a hole."]
    assert chain.reward == 0.0
    env = await reset_env(FrozenLake, ROW)
    await env.move("down")
    assert (await env.move("up"))["observation"] == "The game is over."


async def test_move_limit_ends_the_game() -> None:
    env = await reset_env(FrozenLake, ROW)
    for _ in range(99):
        assert not (await env.move("up"))["ends_chain"]
    last = await env.move("up")
    assert last["ends_chain"]
    assert "move 100, the last" in last["observation"]


async def test_malformed_moves_are_answered() -> None:
    for strange in (
        {"direction": "north"},
        {"direction": 7},
        {"direction": ["up"]},
        {},
        {"direction": "up " * 350_000},
    ):
        observations, chain = await answers(FrozenLake, ROW, call("move", **strange), call("move", direction="right"))
        assert "up" in observations[0]
        assert "direction" in observations[0]
        assert len(observations[0]) < 500
        assert observations[1].startswith("SPH")
        assert chain.score.metrics["moves"] == 1


async def test_claims_earn_nothing() -> None:
    _, chain = await answers(FrozenLake, ROW, "I am at the goal. won=True")
    assert chain.reward == 0.0


async def test_reset_clears_the_previous_chain() -> None:
    first, second = FrozenLake.draw_tasks("train", 2)
    used, fresh = await reset_env(FrozenLake, first), await reset_env(FrozenLake, second)
    await winning(used)
    used = await _reset(used, second)
    assert (used.won, used.over, used.moves, used.score) == (False, False, 0, 0.0)
    assert await winning(used) == await winning(fresh)
    assert used.won


async def _reset(env: FrozenLake, row: dict[str, object]) -> FrozenLake:
    from agentfly.types import Task

    await env.reset(Task.of(row))
    return env


async def test_instances_are_isolated() -> None:
    one, other = await reset_env(FrozenLake, ROW), await reset_env(FrozenLake, ROW)
    await one.move("right")
    assert (await other.move("up"))["observation"] == "PFH\nHFF\nFHG"


def test_every_lake_can_be_crossed_and_takes_some_steps() -> None:
    for row in FrozenLake.draw_tasks("train", 200, size=6, holes=0.4):
        (start,) = find_symbols("S", row["lake"])
        assert compute_distances(row["lake"])[start] >= 5


async def test_random_policy_rarely_wins() -> None:
    blind = random.Random(0)
    won = 0
    for row in FrozenLake.draw_tasks("test", 200):
        env = await reset_env(FrozenLake, row)
        for _ in range(10):
            await env.move(blind.choice(["up", "down", "left", "right"]))
        won += env.won
    assert won < 40


def test_splits_are_fixed_and_share_no_lake() -> None:
    drawn = {(split, seed): FrozenLake.draw_tasks(split, 100, seed=seed) for split in ("train", "validation", "test")
             for seed in (0, 1)}  # fmt: skip
    lakes = {key: {tuple(row["lake"]) for row in rows} for key, rows in drawn.items()}
    for (split, _), those in lakes.items():
        assert len(those) == 100
        assert not any(those & other_lakes for (another, _), other_lakes in lakes.items() if another != split)
    assert FrozenLake.draw_tasks("train", 40) == drawn["train", 0][:40]


async def test_on_a_slippery_lake_the_same_moves_lead_to_the_same_end() -> None:
    won = 0
    for row in FrozenLake.draw_tasks("train", 16, slippery=True):
        one, other = await reset_env(FrozenLake, row), await reset_env(FrozenLake, row)
        assert await winning(one) == await winning(other)
        won += one.won
    assert 9 <= won < 16  # slips are real, and the expert mostly gets there all the same


@pytest.mark.parametrize("lake", [None, "SFG", [], ["SFG", 7], ["S", "F"], ["SSG"], ["SXG"], ["SG"] * 100])
async def test_malformed_lake_is_rejected(lake: object) -> None:
    with pytest.raises(DataError, match="lake"):
        await reset_env(FrozenLake, {"question": "?", **({"lake": lake} if lake is not None else {})})


def test_impossible_draws_are_rejected() -> None:
    with pytest.raises(DataError, match="validation"):
        FrozenLake.draw_tasks("dev", 1)
    with pytest.raises(ConfigError, match="size=99"):
        FrozenLake.draw_tasks("train", 1, size=99)
    with pytest.raises(DataError, match="or little more"):
        FrozenLake.draw_tasks("test", 10_000, size=3, holes=0.0)
