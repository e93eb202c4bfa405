"""Gymnasium's environments through the adapter, compared with Gymnasium itself."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest

from agentfly.environments.games.gymnasium_env import ACTIONS, GymnasiumEnvironment, VisualGymnasium, write_out_colors
from agentfly.errors import ConfigError, DataError
from agentfly.rewards import game_score
from agentfly.types import Task
from tests.environments.games.playing import answers, reset_env
from tests.fakes import call

gymnasium = pytest.importorskip("gymnasium", reason="Gymnasium is in the extra 'gymnasium', which is not installed")

DRY = {"question": "Cross.", "env_id": "FrozenLake-v1", "settings": {"is_slippery": False}, "seed": 1}


class Taxi(GymnasiumEnvironment):
    env_id = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", Taxi.env_id, "CliffWalking-v1", "Blackjack-v1"])
async def test_rewards_equal_those_of_gymnasium(env_id: str) -> None:
    if env_id not in gymnasium.registry:
        pytest.skip(f"this version of Gymnasium has no {env_id}")
    env = await reset_env(GymnasiumEnvironment, {"question": "?", "env_id": env_id, "seed": 3})
    bare = gymnasium.make(env_id)
    bare.reset(seed=3)
    bare.action_space.seed(3)
    earned, over = 0.0, False
    names = ACTIONS[env_id.rpartition("-v")[0]]
    while not over and env.moves < 60:
        choice = int(bare.action_space.sample())
        _, reward, terminated, truncated, _ = bare.step(choice)
        earned, over = earned + float(reward), terminated or truncated
        await env.act(names[choice] if choice % 2 else str(choice))  # by name and by number
        assert (env.score, env.over) == (earned, over)
    bare.close()
    await env.close()


async def test_a_lake_is_crossed_and_drawn() -> None:
    moves = [call("act", action=way) for way in ("down", "DOWN", "right", "1", "right", " right ")]
    observations, chain = await answers(GymnasiumEnvironment, DRY, *moves, reward=game_score)
    assert observations[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert observations[-1].endswith("HFF[G]\nThe game is over.")
    assert (chain.reward, chain.score.metrics["won"]) == (1.0, 1.0)


async def test_invalid_actions_are_answered() -> None:
    strange = ["fly", "", "99", "-1", "1.5", "true", "[1]", "[" * 900, "x" * 1_000_000]
    observations, chain = await answers(
        GymnasiumEnvironment, DRY, *(call("act", action=action) for action in [*strange, 7]), call("look")
    )
    assert len(observations) == 11
    assert all("Error" in observation and len(observation) < 500 for observation in observations[:10])
    assert "Actions: left, down, right, up." in observations[0]
    assert observations[10] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert chain.reward == 0.0


@pytest.mark.parametrize("kind", [GymnasiumEnvironment, Taxi])
async def test_questions_show_the_first_observation_and_splits_are_disjoint(kind: type[GymnasiumEnvironment]) -> None:
    rows = {split: kind.draw_tasks(split, 30) for split in ("train", "validation", "test")}
    assert kind.draw_tasks("train", 10) == rows["train"][:10]
    for row in rows["train"][:5]:
        env = await reset_env(kind, json.loads(json.dumps(row)))
        assert row["question"].endswith(await env.look())
        await env.close()
    column = "question" if kind is Taxi else "seed"
    contents = {split: {row[column] for row in those} for split, those in rows.items()}
    assert not contents["train"] & (contents["validation"] | contents["test"])
    assert not contents["validation"] & contents["test"]


async def test_reset_clears_state_and_instances_are_isolated() -> None:
    first, second = Taxi.draw_tasks("train", 2)
    used, fresh, other = await reset_env(Taxi, first), await reset_env(Taxi, second), await reset_env(Taxi, first)
    first_view = other.view
    for _ in range(5):
        await used.act("south")
    assert other.view == first_view
    await used.reset(Task.of(second))
    assert (used.view, used.moves, used.score, used.over) == (fresh.view, 0, 0.0, False)
    for env in (used, fresh, other):
        await env.close()


async def test_actions_of_other_shapes() -> None:
    from gymnasium import spaces

    class Worded(gymnasium.Env):  # type: ignore[misc, name-defined]
        observation_space = spaces.Text(50)
        metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

        def __init__(self, action_space: Any) -> None:
            self.action_space = action_space

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            return "Say it.", {}

        def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return f"You said {action}.", 0.5, False, False, {}

    gymnasium.register("agentfly-tests/Worded-v0", entry_point=Worded, order_enforce=False)
    try:
        observations = []
        pair, shifted = spaces.MultiDiscrete([3, 4]), spaces.Discrete(3, start=5)
        for space, action in ((spaces.Text(9), "hello"), (pair, "[2, 3]"), (pair, "[5, 5]"), (shifted, "7")):
            row = {"question": "?", "env_id": "agentfly-tests/Worded-v0", "settings": {"action_space": space}}
            env = await reset_env(GymnasiumEnvironment, row)
            observations.append((await env.act(action))["observation"])
            await env.close()
    finally:
        del gymnasium.registry["agentfly-tests/Worded-v0"]
    assert observations[0] == "You said hello."
    assert observations[1] == "You said [2 3]."
    assert observations[2].startswith("Error: there is no action '[5, 5]'")
    assert observations[3] == "You said 7."


async def test_unknown_names_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"cannot make 'Nothing-v0'.*Nothing"):
        await reset_env(GymnasiumEnvironment, {"question": "?", "env_id": "Nothing-v0"})
    with pytest.raises(ConfigError, match="nonsense"):
        await reset_env(GymnasiumEnvironment, {**DRY, "settings": {"nonsense": 1}})
    with pytest.raises(DataError, match="cannot be reset"):
        await reset_env(GymnasiumEnvironment, {**DRY, "seed": "many"})
    with pytest.raises(DataError, match="validation"):
        GymnasiumEnvironment.draw_tasks("dev", 1)


def test_colors_are_written_out() -> None:
    assert write_out_colors("a\x1b[43m \x1b[0m\x1b[34;1mR\x1b[0mb") == "a[ ]R(blue)b"


async def test_images_are_shown_instead_of_text() -> None:
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("pygame", reason="Gymnasium draws its own games with pygame: pip install 'gymnasium[toy-text]'")
    env = await reset_env(VisualGymnasium, DRY)
    image_before = (await env.look())["image"]
    result = await env.act("down")
    assert result["observation"] == ""
    assert result["image"] != image_before
    assert (await env.look())["image"] == result["image"]
    with pillow.open(io.BytesIO(base64.b64decode(result["image"].url.partition(",")[2]))) as image:
        bare = gymnasium.make("FrozenLake-v1", is_slippery=False, render_mode="rgb_array")
        bare.reset(seed=1)
        bare.step(1)
        assert image.tobytes() == bare.render().tobytes()
        bare.close()
    assert "there is no action 'fly'" in (await env.act("fly"))["observation"]
    await env.close()


async def test_images_of_drawn_tasks_are_small_and_seeded() -> None:
    pytest.importorskip("pygame", reason="Gymnasium draws its own games with pygame: pip install 'gymnasium[toy-text]'")

    class Pole(VisualGymnasium):
        env_id = "CartPole-v1"
        max_edge = 96

    rows = Pole.draw_tasks("train", 3)
    assert rows == Pole.draw_tasks("train", 3)
    assert {row["question"] for row in rows} == {"Actions: 0, 1."}
    assert all(row["image"].startswith("data:image/png") for row in rows)


async def test_recipe_shows_small_lakes_and_holds_out_200() -> None:
    pillow = pytest.importorskip("PIL.Image")
    pytest.importorskip("pygame", reason="Gymnasium draws its own games with pygame: pip install 'gymnasium[toy-text]'")
    from agentfly.environments.games.recipes import visual_gymnasium as recipe

    lakes = {"".join(lake) for lake in recipe.LAKES}
    train_lakes, held_out = (
        {"".join(row["settings"]["desc"]) for row in rows} for rows in (recipe.tasks, recipe.eval_tasks)
    )
    assert (len(lakes), len(train_lakes), len(held_out)) == (720, 520, 200)
    assert train_lakes | held_out == lakes

    row = next(row for row in recipe.eval_tasks if row["settings"]["desc"][0][1] == "G")
    env = await reset_env(recipe.LakeInImages, row)
    assert env.expert().arguments["goal"] == 2
    result = await env.go(goal=2, toward="N")
    assert result["won"]
    with pillow.open(io.BytesIO(base64.b64decode(result["image"].url.partition(",")[2]))) as image:
        assert image.size == (48, 48)
    await env.close()


async def test_environment_without_images_is_rejected() -> None:
    class Silent(gymnasium.Env):  # type: ignore[misc, name-defined]
        action_space = gymnasium.spaces.Discrete(2)
        observation_space = gymnasium.spaces.Discrete(2)

        def reset(self, **_: Any) -> tuple[int, dict[str, Any]]:
            return 0, {}

    gymnasium.register("Silent-v0", Silent)
    try:
        with pytest.raises(ConfigError, match="renders no images"):
            await reset_env(VisualGymnasium, {"question": "?", "env_id": "Silent-v0", "seed": 1})
    finally:
        del gymnasium.registry["Silent-v0"]
