"""Adapter for TextArena's single-player games.

TextArena seeds Python's global random generator, so every instance runs in its own process. Some of its games need more
than the package: Python 3.12, word lists of nltk, or an API key for a judge model.
"""

from __future__ import annotations

import difflib
import random as python_random
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from agentfly.environment import Pool
from agentfly.environments.data import sample_tasks
from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, DataError, describe, require_extra
from agentfly.types import Task, ToolCall

_GAME_SENDER = -1
"""TextArena's sender id for messages of the game itself."""


class TextArenaGame(TextGame):
    """A single-player game of TextArena (extra `textarena`). It is won if its reward is 1."""

    pool = Pool(runtime="process")
    scored_by = "game_won"
    game: ClassVar[str] = "GuessTheNumber-v0"
    """Default for the task's column `game`."""

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, games: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Seeds of `games` (None: the default game), round-robin. The split is a hash of the seed."""
        names = list(games or [cls.game])

        def draw(random: Random, row: int) -> tuple[str, dict[str, Any]]:
            name, number = names[row % len(names)], random.randrange(2**31)
            state = python_random.getstate()
            try:
                _, question = _start_game(name, number)
            finally:
                python_random.setstate(state)
            return f"{name} {number}", {"question": question, "game": name, "seed": number}

        return sample_tasks("textarena", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Start the game in the column `game` with the column `seed`."""
        self.begin()
        self._env, self.view = _start_game(task.columns.get("game", self.game), task.columns.get("seed"))

    def possible_numbers(self) -> range:
        """The numbers that the hints of GuessTheNumber leave. Raises ConfigError for another game."""
        hints = self._env.state.game_state.get("guess_history")
        if hints is None or not hasattr(self._env, "max_number"):
            raise ConfigError(f"there is no expert for {type(self._env).__name__}; there is one for GuessTheNumber")
        low, high = self._env.min_number, self._env.max_number
        for guess, hint in hints:
            low, high = (max(low, guess + 1), high) if hint == "higher" else (low, min(high, guess - 1))
        return range(low, high + 1)

    def expert(self) -> ToolCall | str:
        """Bisect in GuessTheNumber, by the hints so far. Raises ConfigError for another game."""
        left = self.possible_numbers()
        if self.over:
            return "The game is over."
        return ToolCall("act", {"action": str((left[0] + left[-1]) // 2)})

    async def _act(self, action: str) -> str:
        """Games parse text in square brackets; these are added to an action without any."""
        over, _ = self._env.step(action=action if "[" in action else f"[{action.strip()}]")
        self.over = bool(over)
        self.view = _read_messages(self._env)
        if not self.over:
            return self.view
        rewards, about = self._env.close()
        self.score = float((rewards or {}).get(0, 0.0))
        self.won = self.score >= 1
        return f"{self.view}\n{about[0].get('reason') or ''}\nThe game is over.".strip()


def _start_game(name: Any, seed: Any) -> tuple[Any, str]:
    """A game without TextArena's wrappers, which repeat earlier messages, and its first observation."""
    with require_extra("TextArenaGame", "textarena"):
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        close = difflib.get_close_matches(str(name)[:80], ENV_REGISTRY, 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise DataError(
            f"TextArena has no game {name!r:.80}; textarena.pprint_registry_detailed() lists the available ones.{hint}"
        )
    try:
        env = textarena.make(f"{name}-raw" if f"{name}-raw" in ENV_REGISTRY else name)
        env.reset(num_players=1, seed=seed)
        return env, _read_messages(env)
    except AssertionError as error:
        raise ConfigError(f"{name} is not a single-player game: {error}") from error
    except (SyntaxError, ImportError, LookupError, OSError, ValueError) as error:
        raise ConfigError(f"TextArena cannot start {name} here: {describe(error)[:500]}") from error


def _read_messages(env: Any) -> str:
    """The game's messages since the last call, without the player's actions."""
    _, messages = env.get_observation()
    return "\n".join(str(message).strip() for sender, message, _ in messages if sender == _GAME_SENDER).strip()
