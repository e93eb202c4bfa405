"""Adapters for Gymnasium environments with discrete, integer-vector or text actions.

`GymnasiumEnvironment` shows the environment's text rendering (`ansi`) if it has one, else the observation as JSON.
Terminal colors are written out: `[x]` is highlighted, `x(blue)` is colored. `VisualGymnasium` shows images.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from agentfly.environments.data import sample_tasks
from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, DataError, describe, require_extra
from agentfly.tooling import tool
from agentfly.types import Image, Task

ACTIONS: dict[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
}
"""Action names of some environments, by id without the version."""
_PROBES = 10
"""Seeds tried to find out whether the first observation depends on the seed."""
_COLORS = dict(zip(range(30, 38), ("grey", "red", "green", "yellow", "blue", "magenta", "cyan", "white"), strict=True))
_COLORED = re.compile(r"\x1b\[(\d+)(?:;1)?m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumEnvironment(TextGame):
    """A Gymnasium environment (extra `gymnasium`). It is won if it terminates with a reward above 0."""

    env_id: ClassVar[str] = "FrozenLake-v1"
    """Default for the task's column `env_id`."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Keyword arguments of `gymnasium.make`; default for the task's column `settings`."""
    actions: ClassVar[Sequence[str]] = ()
    """Action names in order. Empty for the known names of the environment, or numbers."""
    _render_mode: ClassVar[str] = "ansi"
    """Rendering that is used if the environment has it."""
    _env: Any = None
    _made_with: tuple[Any, dict[str, Any]] | None = None

    @classmethod
    def draw_tasks(cls, split: str = "train", count: int = 100, *, seed: int = 0) -> list[dict[str, Any]]:
        """Seeds of the environment `env_id` with the first observation as the question.

        The split is a hash of the first observation, or of the seed if all first observations are equal.
        """
        env = cls()

        def make_row(number: int) -> dict[str, Any]:
            row = {"env_id": cls.env_id, "settings": dict(cls.settings), "seed": number}
            return {**env.describe_task(row), **row}

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]]:
            row = make_row(random.randrange(2**31))
            content = row["question"] + row.get("image", "")
            return (content if varied else str(row["seed"])), row

        try:
            first = [make_row(number) for number in range(_PROBES)]
            varied = len({(row["question"], row.get("image")) for row in first}) > 1
            return sample_tasks(cls.env_id, split, count, seed, draw, allow_repeats=True)
        finally:
            env.close_env()

    async def reset(self, task: Task) -> None:
        """Start with the columns `env_id`, `settings`, `seed` and `options`."""
        self.begin_task(task.columns)

    def begin_task(self, columns: Mapping[str, Any]) -> None:
        """Make the environment, unless the current one has the same id and settings, and reset it."""
        self.begin()
        requested = columns.get("env_id", self.env_id), dict(columns.get("settings", self.settings))
        if self._env is None or self._made_with != requested:
            self.close_env()
            with require_extra("GymnasiumEnvironment", "gymnasium"):
                import gymnasium
            env_id, settings = requested
            try:
                env = gymnasium.make(env_id, disable_env_checker=True, **settings)
                if self._render_mode in env.metadata.get("render_modes", ()) and "render_mode" not in settings:
                    env.close()
                    env = gymnasium.make(env_id, disable_env_checker=True, render_mode=self._render_mode, **settings)
            except (gymnasium.error.Error, ModuleNotFoundError, TypeError, AttributeError) as error:
                raise ConfigError(f"Gymnasium cannot make {env_id!r:.80}: {describe(error)}") from error
            self._env, self._made_with = env, requested
        default_actions = ACTIONS.get(str(requested[0]).rpartition("-v")[0].rpartition("/")[2], ())
        self._names = [str(name) for name in columns.get("actions", self.actions or default_actions)]
        try:
            observation, _ = self._env.reset(seed=columns.get("seed"), options=columns.get("options"))
        except Exception as error:
            raise DataError(f"{requested[0]} cannot be reset with these columns: {describe(error)}") from error
        self.view = self._render(observation)

    async def _act(self, action: str) -> str:
        chosen = self._parse_action(action.strip())
        if chosen is None:
            return f"Error: there is no action {action!r:.80}. {self.describe_actions()}"
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        self.score += float(reward)
        self.over = bool(terminated or truncated)
        self.won = bool(terminated) and float(reward) > 0
        self.view = self._render(observation)
        return self.view + ("\nThe game is over." if self.over else "")

    @property
    def unwrapped(self) -> Any:
        """Gymnasium's environment without its wrappers."""
        return self._env.unwrapped

    def describe_actions(self) -> str:
        """The available actions."""
        from gymnasium.spaces import Discrete

        space = self._env.action_space
        numbers = range(space.start, space.start + space.n) if isinstance(space, Discrete) else ()
        return f"Actions: {', '.join(self._names or map(str, numbers)) or space}."

    def _parse_action(self, action: str) -> Any:
        """The action as an element of the action space. None if it is not one."""
        from gymnasium.spaces import Discrete, Text

        space = self._env.action_space
        if isinstance(space, Text):
            return action if space.contains(action) else None
        if action.lower() in self._names:
            return space.start + self._names.index(action.lower())
        try:
            value = json.loads(action)
            chosen = value if isinstance(space, Discrete) else space.from_jsonable([value])[0]
            return chosen if not isinstance(chosen, bool) and space.contains(chosen) else None
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError):
            return None

    def describe_task(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a task with these columns, and return those that show the actions and the first observation."""
        self.begin_task(columns)
        return {"question": f"{self.describe_actions()}\n{self.view}"}

    def _render(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return write_out_colors(self._env.render()).strip("\n")
        if isinstance(observation, str):
            return observation
        return json.dumps(observation, default=lambda value: value.tolist())  # NumPy scalars and arrays

    def close_env(self) -> None:
        """Close Gymnasium's environment, if there is one."""
        if self._env is not None:
            self._env.close()
            self._env = None

    async def close(self) -> None:
        self.close_env()


class VisualGymnasium(GymnasiumEnvironment):
    """A Gymnasium environment that renders images (`rgb_array`): the model sees these instead of text."""

    max_edge: ClassVar[int] = 384
    """Larger images are reduced so that their longer edge has this many pixels."""
    _render_mode = "rgb_array"
    _frame: Image | None = None

    def describe_task(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a task with these columns, and return those that show the actions and the first image."""
        self.begin_task(columns)
        assert self._frame is not None
        return {"question": self.describe_actions(), "image": self._frame.url}

    def _render(self, observation: Any) -> str:
        with require_extra("VisualGymnasium", "vision"):
            from PIL import Image as Pillow
        if self._env.render_mode != "rgb_array":
            raise ConfigError(f"{self._env.spec.id} renders no images (rgb_array); GymnasiumEnvironment shows its text")
        driver = os.environ.get("SDL_VIDEODRIVER")
        os.environ["SDL_VIDEODRIVER"] = "dummy"  # for pygame, which would look for a display
        try:
            image = Pillow.fromarray(self._env.render())
        except Exception as error:
            raise ConfigError(f"{self._env.spec.id} cannot be drawn: {describe(error)}") from error
        finally:
            del os.environ["SDL_VIDEODRIVER"]
            os.environ |= {"SDL_VIDEODRIVER": driver} if driver is not None else {}
        image.thumbnail((self.max_edge, self.max_edge))
        self._frame = Image.of(image)
        return ""

    async def play(self, action: Any) -> dict[str, Any]:
        """Carry out an action unless the game is over; returns the tool result with the image after it."""
        result = await super().play(action)
        return {**result, "observation": result["observation"].strip("\n"), "image": self._frame}

    @tool
    async def look(self) -> dict[str, Any]:
        """Show again what there is to see now."""
        return {"observation": "", "image": self._frame}


def write_out_colors(rendering: str) -> str:
    """Replace the color codes of a rendering by text."""

    def replace(match: re.Match[str]) -> str:
        code, text = int(match[1]), match[2]
        return f"{text}({_COLORS[code]})" if code in _COLORS else f"[{text}]"

    return _COLORED.sub(replace, rendering)
