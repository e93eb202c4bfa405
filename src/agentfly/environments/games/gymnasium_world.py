"""Any Gymnasium environment whose actions can be said: a choice among some, a few whole numbers, or text.

What is seen is the environment's own drawing in text where it has one, else its observation as it is. Colours of the
drawing become signs, since a model cannot see them: `[x]` is highlighted, `x(blue)` is in a colour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from agentfly.environments.drawing import drawn
from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, DataError, describe
from agentfly.extras import needed
from agentfly.types import Task

ACTIONS: dict[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
}
"""Names of the actions of some environments, by what stands before the version in their ids."""
_TRIED = 10
"""Seeds by which it is found out whether an environment always begins alike."""
_COLOURS = dict(zip(range(30, 38), ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white"), strict=True))
_COLOURED = re.compile(r"\x1b\[(\d+)(?:;1)?m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumWorld(TextGame):
    """An environment of Gymnasium, by its id (extra `gymnasium`). It is won if it ends with a reward above 0."""

    env_id: ClassVar[str] = "FrozenLake-v1"
    """The environment, where the task's column `env_id` names none."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """What it is made with, where the task's column `settings` says nothing."""
    actions: ClassVar[Sequence[str]] = ()
    """Names of its actions in their order; none: those that are known for it, or numbers."""
    _env: Any = None
    _asked: tuple[Any, dict[str, Any]] | None = None

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """So many seeds of the environment `env_id`, with what is to be seen at first.

        What is seen at first decides the split; or the seed, in an environment that always begins alike.
        """
        world = cls()

        def begun(number: int) -> dict[str, Any]:
            row = {"env_id": cls.env_id, "settings": dict(cls.settings), "seed": number}
            world.begin_task(row)
            return {"question": f"{world.rules()}\n{world.seen}", **row}

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]]:
            row = begun(random.randrange(2**31))
            return (row["question"] if varied else str(row["seed"])), row

        try:
            varied = len({begun(number)["question"] for number in range(_TRIED)}) > 1
            return drawn(cls.env_id, split, count, seed, draw, again=True)
        finally:
            world._end()

    async def reset(self, task: Task) -> None:
        """Begin as the columns `env_id`, `settings`, `seed` and `options` say."""
        self.begin_task(task.columns)

    def begin_task(self, columns: Mapping[str, Any]) -> None:
        """Make the environment, or take the one there is if it is the same, and reset it with the seed."""
        self.begin()
        asked = columns.get("env_id", self.env_id), dict(columns.get("settings", self.settings))
        if self._env is None or self._asked != asked:
            self._end()
            self._env, self._asked = _made(*asked), asked
        known = ACTIONS.get(str(asked[0]).rpartition("-v")[0].rpartition("/")[2], ())
        self._names = [str(name) for name in columns.get("actions", self.actions or known)]
        try:
            observation, _ = self._env.reset(seed=columns.get("seed"), options=columns.get("options"))
        except Exception as error:
            raise DataError(f"{asked[0]} cannot be reset with these columns: {describe(error)}") from error
        self.seen = self._shown(observation)

    async def _act(self, action: str) -> str:
        chosen = self._chosen(action.strip())
        if chosen is None:
            return f"Error: there is no action {action!r:.80}. {self.rules()}"
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        self.score += float(reward)
        self.over = bool(terminated or truncated)
        self.won = bool(terminated) and float(reward) > 0
        self.seen = self._shown(observation)
        return self.seen + ("\nThe game is over." if self.over else "")

    def rules(self) -> str:
        """Which actions there are."""
        space = self._env.action_space
        numbers = range(space.start, space.start + space.n) if _is("Discrete", space) else ()
        return f"Actions: {', '.join(self._names or map(str, numbers)) or space}."

    def _chosen(self, action: str) -> Any:
        """The action that is meant; None where there is none such."""
        space = self._env.action_space
        if _is("Text", space):
            return action if space.contains(action) else None
        if action.lower() in self._names:
            return space.start + self._names.index(action.lower())
        try:
            value = json.loads(action)
            chosen = value if _is("Discrete", space) else space.from_jsonable([value])[0]
            return chosen if not isinstance(chosen, bool) and space.contains(chosen) else None
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
            return None

    def _shown(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return without_colours(self._env.render()).strip("\n")
        return _plain(observation)

    def _end(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    async def close(self) -> None:
        self._end()


def _is(kind: str, space: Any) -> bool:
    from gymnasium import spaces

    return isinstance(space, getattr(spaces, kind))


def without_colours(drawing: str) -> str:
    """A drawing with signs in the place of its colours."""

    def sign(found: re.Match[str]) -> str:
        code, text = int(found[1]), found[2]
        return f"{text}({_COLOURS[code]})" if code in _COLOURS else f"[{text}]"

    return _COLOURED.sub(sign, drawing)


def _plain(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=lambda value: value.tolist())  # numbers and arrays of numpy


def _made(env_id: Any, settings: dict[str, Any]) -> Any:
    with needed("GymnasiumWorld", "gymnasium"):
        import gymnasium

    try:
        made = gymnasium.make(env_id, disable_env_checker=True, **settings)
        if "ansi" in made.metadata.get("render_modes", ()) and "render_mode" not in settings:
            made.close()
            made = gymnasium.make(env_id, disable_env_checker=True, render_mode="ansi", **settings)
    except (gymnasium.error.Error, ModuleNotFoundError, TypeError, AttributeError) as error:
        raise ConfigError(f"Gymnasium cannot make {env_id!r:.80}: {describe(error)}") from error
    return made
