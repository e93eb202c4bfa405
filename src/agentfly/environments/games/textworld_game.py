"""Adapter for TextWorld: plays a game file, or a game generated from a seed and sizes.

A game is played from a `.z8` file with its `.json` next to it, as TextWorld writes them. Games are compiled once, into
a folder that all instances share, so only the first chain of a new game takes seconds. Every instance runs in its own
process, since TextWorld's interpreter is a library with global state.
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
from agentfly.environments.data import sample_tasks
from agentfly.environments.games.game import TextGame
from agentfly.errors import ConfigError, DataError, describe, require_extra
from agentfly.types import Task, ToolCall

OPTIONS = ("seed", "rooms", "objects", "quest_length")
"""Options of a generated game."""
_ZMACHINE_VERSIONS = tuple(bytes([version]) for version in range(1, 9))
"""Possible first bytes of a Z-machine story file."""
_BANNER = re.compile(r"[\s|\\/<>]*+[$_][\s|\\/<>_$]*+")
_PROMPT = re.compile(r"\n?>\s*+(?:-=.*=-\d+/\d+\s*+)?$")


class TextWorldGame(TextGame):
    """A game of TextWorld (extra `textworld`, parts of which are GPL). Its score is the fraction of points, 0 to 1."""

    pool = Pool(runtime="process", reset_timeout=180.0)
    scored_by = "game_won"
    folder: ClassVar[str | None] = None
    """Folder of compiled games. None for AgentFly's cache."""
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
        """Games with these numbers of rooms, objects and quest commands; they are compiled when first played."""
        sizes = {"rooms": rooms, "objects": objects, "quest_length": quest_length}

        def draw(random: Random, _: int) -> tuple[str, dict[str, Any]]:
            options = {"seed": random.randrange(65536), **sizes}
            game = _generate_game(options)
            return json.dumps(game.serialize(), sort_keys=True, default=str), {
                "question": str(game.objective),
                "game": options,
            }

        return sample_tasks("textworld", split, count, seed, draw)

    async def reset(self, task: Task) -> None:
        """Start the game in the column `game`: the path of a file, or the options of a generated game."""
        await self.close()
        self.begin()
        path = self._find_file(task.columns.get("game"))
        textworld = _import_textworld()
        infos = textworld.EnvInfos(won=True, lost=True, score=True, max_score=True, policy_commands=True)
        try:
            self._env = textworld.start(str(path), infos)
            self._state = self._env.reset()
        except Exception as error:
            raise DataError(f"TextWorld cannot play {path}: {describe(error)}") from error
        self.view = clean_feedback(self._state.feedback)

    def _find_file(self, game: Any) -> Path:
        if isinstance(game, Mapping):
            return self._compile(json.dumps(game, sort_keys=True, default=str), lambda: _generate_game(game))
        if not isinstance(game, str) or not Path(game).is_file():
            raise DataError(
                f"the column 'game' must be the path of a game file or an object with {', '.join(OPTIONS)}, "
                f"not {game!r:.80}"
            )
        if game.endswith(".json"):
            return self._compile(Path(game).read_text(), lambda: _import_textworld().Game.load(game))
        if Path(game).read_bytes()[:1] not in _ZMACHINE_VERSIONS:  # the interpreter would exit the process
            raise DataError(f"TextWorld cannot play {game}: it is not a Z-machine story file")
        return Path(game)

    def _compile(self, source: str, game: Callable[[], Any]) -> Path:
        """The compiled game for this source; compiled in a temporary folder and moved into place atomically."""
        _import_textworld()
        from textworld.generator import GameOptions, compile_game

        from agentfly.models.cache import cache_root

        folder = Path(self.folder) if self.folder else cache_root().parent / "textworld"
        game_folder = folder / hashlib.sha256(source.encode()).hexdigest()[:20]
        if not game_folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as draft:
                options = GameOptions()
                options.path = f"{draft}/game/game.z8"
                compile_game(game(), options)
                try:
                    os.rename(f"{draft}/game", game_folder)
                except OSError:
                    if not game_folder.is_dir():  # otherwise another instance was faster
                        raise
        return game_folder / "game.z8"

    async def _act(self, action: str) -> str:
        self._state, _, done = self._env.step(" ".join(action.split()) or "look")
        self.won = bool(self._state["won"])
        self.over = bool(done) or self.won or bool(self._state["lost"])
        self.score = float(self._state["score"] or 0) / float(self._state["max_score"] or 1)
        self.view = clean_feedback(self._state.feedback)
        return self.view

    def expert(self) -> ToolCall | str:
        """The next command of TextWorld's own policy."""
        if self.over:
            return "Done."
        commands = self._state["policy_commands"]
        return ToolCall("act", {"action": commands[0]}) if commands else "There is no way left."

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def clean_feedback(feedback: Any) -> str:
    """Feedback without the banner, prompt, status line and extra empty lines."""
    lines = [line for line in _PROMPT.sub("", str(feedback)).splitlines() if not _BANNER.fullmatch(line)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _import_textworld() -> Any:
    with require_extra("TextWorldGame", "textworld"):
        import textworld

    return textworld


def _generate_game(options: Mapping[str, Any]) -> Any:
    """Generate a game."""
    if unknown := [name for name in options if name not in OPTIONS]:
        raise DataError(f"a generated game has the options {', '.join(OPTIONS)}, not {unknown!r:.80}")
    _import_textworld()
    from textworld.generator import GameOptions, make_game
    from textworld.generator.data import KnowledgeBase

    settings = GameOptions()
    settings.kb = KnowledgeBase.default()  # otherwise the grammar is parsed for every game, which takes seconds
    settings.seeds = int(options.get("seed", 0))
    settings.nb_rooms, settings.nb_objects = int(options.get("rooms", 1)), int(options.get("objects", 1))
    settings.quest_length = int(options.get("quest_length", 1))
    try:
        return make_game(settings)
    except Exception as error:
        raise ConfigError(f"TextWorld cannot generate a game with {dict(options)!r:.200}: {describe(error)}") from error
