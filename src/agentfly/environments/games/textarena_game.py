"""TextArena's games for one player, by their ids.

TextArena draws from Python's own random numbers, which it seeds for the whole process; so every instance has a process
of its own. Some of its games need more than the package: Python 3.12, word lists of nltk, or the key of a judge.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from agentfly.environment import Pool
from agentfly.environments.drawing import drawn
from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, DataError, describe
from agentfly.extras import needed
from agentfly.types import Task

_OF_THE_GAME = -1
"""Whom TextArena names as the sender of what the game itself says."""


class TextArenaGame(TextGame):
    """A game of TextArena for one player (extra `textarena`). It is won where its reward is 1."""

    pool = Pool(place="process")
    scored_by = "game_won"
    game: ClassVar[str] = "GuessTheNumber-v0"
    """The game, where the task's column `game` names none."""

    @classmethod
    def draw_tasks(
        cls, split: str = "train", count: int = 100, *, seed: int = 0, games: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """So many seeds of these games, in turn; None: of the class's own. The seed decides the split."""
        names = list(games or [cls.game])

        def draw(random: Random, row: int) -> tuple[str, dict[str, Any]]:
            name, number = names[row % len(names)], random.randrange(2**31)
            state = python_random.getstate()
            try:
                _, question = _begun(name, number)
            finally:
                python_random.setstate(state)
            return f"{name} {number}", {"question": question, "game": name, "seed": number}

        return drawn("textarena", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Begin the game of the column `game` with the column `seed`."""
        self.begin()
        self._env, self.seen = _begun(task.columns.get("game", self.game), task.columns.get("seed"))

    async def _act(self, action: str) -> str:
        """Games look for what stands in square brackets; an action without any is put into them."""
        self.over, _ = self._env.step(action=action if "[" in action else f"[{action.strip()}]")
        self.over = bool(self.over)
        self.seen = _said(self._env)
        if not self.over:
            return self.seen
        rewards, about = self._env.close()
        self.score = float((rewards or {}).get(0, 0.0))
        self.won = self.score >= 1
        return f"{self.seen}\n{about[0].get('reason') or ''}\nThe game is over.".strip()


def _begun(name: Any, seed: Any) -> tuple[Any, str]:
    """A game, and what it says at first: without TextArena's wrappers, which repeat all that was said before."""
    with needed("TextArenaGame", "textarena"):
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        raise DataError(
            f"TextArena has no game {name!r:.80}; textarena.pprint_registry_detailed() lists those there are"
        )
    try:
        env = textarena.make(f"{name}-raw" if f"{name}-raw" in ENV_REGISTRY else name)
        env.reset(num_players=1, seed=seed)
        return env, _said(env)
    except AssertionError as error:
        raise ConfigError(f"{name} is no game for one player: {error}") from error
    except (SyntaxError, ImportError, LookupError, OSError, ValueError) as error:
        raise ConfigError(f"TextArena cannot begin {name} here: {describe(error)[:500]}") from error


def _said(env: Any) -> str:
    """What the game itself has said since it was last asked; not what the player did."""
    _, said = env.get_observation()
    return "\n".join(str(message).strip() for sender, message, _ in said if sender == _OF_THE_GAME).strip()
