"""Games of TextWorld: a file of one, or one that TextWorld makes of a seed and a few numbers.

A game is played from a `.z8` file with its `.json` beside it, as TextWorld writes them. What is not compiled yet is
compiled once, into a folder that all instances share; so the first chain of a new game takes seconds, the next ones do
not. Every instance has a process of its own, since TextWorld's interpreter is a library with one state.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from agentfly.environment import Pool
from agentfly.environments.drawing import drawn
from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, DataError, describe
from agentfly.extras import needed
from agentfly.types import Task, ToolCall

OPTIONS = ("seed", "rooms", "objects", "quest_length")
"""What a game is made of."""
_VERSIONS = tuple(bytes([version]) for version in range(1, 9))
"""How a story of the Z-machine begins."""
_BANNER = re.compile(r"[\s|\\/<>]*+[$_][\s|\\/<>_$]*+")
_PROMPT = re.compile(r"\n?>\s*+(?:-=.*=-\d+/\d+\s*+)?$")


class TextWorldGame(TextGame):
    """A game of TextWorld (extra `textworld`; parts of it are GPL). Its score is the share of points, from 0 to 1."""

    pool = Pool(place="process", reset_timeout=180.0)
    scored_by = "game_won"
    folder: ClassVar[str | None] = None
    """Where compiled games are kept; None: in the folder of AgentFly's other prepared things."""
    _env: Any = None

    @classmethod
    def draw_tasks(
        cls,
        split: str = "train",
        count: int = 100,
        *,
        seed: int = 0,
        rooms: int = 3,
        objects: int = 6,
        quest_length: int = 3,
    ) -> list[dict[str, Any]]:
        """Games with so many rooms and objects, in which a quest takes so many commands; none is compiled yet."""
        sizes = {"rooms": rooms, "objects": objects, "quest_length": quest_length}

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]]:
            options = {"seed": random.randrange(65536), **sizes}
            game = _made(options)
            return _text(game), {"question": str(game.objective), "game": options}

        return drawn("textworld", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Begin the game of the column `game`: the path of a file, or what one is made of."""
        await self.close()
        self.begin()
        path = self._path(task.columns.get("game"))
        textworld = _library()
        infos = textworld.EnvInfos(won=True, lost=True, score=True, max_score=True, policy_commands=True)
        try:
            self._env = textworld.start(str(path), infos)
            self._state = self._env.reset()
        except Exception as error:
            raise DataError(f"TextWorld cannot play {path}: {describe(error)}") from error
        self.seen = tidied(self._state.feedback)

    def _path(self, game: Any) -> Path:
        if isinstance(game, Mapping):
            return self._compiled(json.dumps(game, sort_keys=True, default=str), lambda: _made(game))
        if not isinstance(game, str) or not Path(game).is_file():
            raise DataError(
                f"the column 'game' is the path of a game's file, or {', '.join(OPTIONS)} to make one; not {game!r:.80}"
            )
        if game.endswith(".json"):
            return self._compiled(Path(game).read_text(), lambda: _library().Game.load(game))
        if Path(game).read_bytes()[:1] not in _VERSIONS:  # the interpreter would end its process with a bad one
            raise DataError(f"TextWorld cannot play {game}: it is no story of the Z-machine")
        return Path(game)

    def _compiled(self, source: str, game: Callable[[], Any]) -> Path:
        """The file of the game with this source, which is made in a folder beside its place and moved there whole."""
        _library()
        from textworld.generator import GameOptions, compile_game

        from agentfly.models.cache import root

        folder = Path(self.folder) if self.folder else root().parent / "textworld"
        place = folder / hashlib.sha256(source.encode()).hexdigest()[:20]
        if not place.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                options = GameOptions()
                options.path = f"{draft}/game/game.z8"
                compile_game(game(), options)
                try:
                    os.rename(f"{draft}/game", place)
                except OSError:
                    if not place.is_dir():  # else another instance was quicker
                        raise
        return place / "game.z8"

    async def _act(self, action: str) -> str:
        self._state, _, done = self._env.step(" ".join(action.split()) or "look")
        self.won = bool(self._state["won"])
        self.over = bool(done) or self.won or bool(self._state["lost"])
        self.score = float(self._state["score"] or 0) / float(self._state["max_score"] or 1)
        self.seen = tidied(self._state.feedback)
        return self.seen

    def expert(self) -> ToolCall | str:
        """The next command of the quest, which TextWorld keeps up to date."""
        if self.over:
            return "Done."
        commands = self._state["policy_commands"]
        return ToolCall("act", {"action": commands[0]}) if commands else "There is no way left."

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def tidied(feedback: Any) -> str:
    """What the game says, without its banner, the prompt, the status line and needless empty lines."""
    kept = [line for line in _PROMPT.sub("", str(feedback)).splitlines() if not _BANNER.fullmatch(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _library() -> Any:
    with needed("TextWorldGame", "textworld"):
        import textworld

    return textworld


def _made(options: Mapping[str, Any]) -> Any:
    """The game of these options."""
    if strange := [name for name in options if name not in OPTIONS]:
        raise DataError(f"a game is made of {', '.join(OPTIONS)}, not of {strange!r:.80}")
    _library()
    from textworld.generator import GameOptions, make_game
    from textworld.generator.data import KnowledgeBase

    asked = GameOptions()
    asked.kb = KnowledgeBase.default()  # else its grammar is parsed anew for every game, which takes seconds
    asked.seeds = int(options.get("seed", 0))
    asked.nb_rooms, asked.nb_objects = int(options.get("rooms", 1)), int(options.get("objects", 1))
    asked.quest_length = int(options.get("quest_length", 1))
    try:
        return make_game(asked)
    except Exception as error:
        raise ConfigError(f"TextWorld makes no game of {dict(options)!r:.200}: {describe(error)}") from error


def _text(game: Any) -> str:
    return json.dumps(game.serialize(), sort_keys=True, default=str)
