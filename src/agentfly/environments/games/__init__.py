"""Games: frozen lake and Sokoban are built in. Adapters for other packages need an extra each.

A class is imported on first use, so that one game does not load the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfly.environments.games.chess_puzzle import ChessPuzzle, lichess_tasks
    from agentfly.environments.games.frozen_lake import FrozenLake
    from agentfly.environments.games.game import GameEnvironment, TextGame
    from agentfly.environments.games.gymnasium_env import GymnasiumEnvironment, VisualGymnasium
    from agentfly.environments.games.openenv_env import OpenEnvEnvironment
    from agentfly.environments.games.reasoning_gym import ReasoningGym
    from agentfly.environments.games.sokoban import Sokoban
    from agentfly.environments.games.textarena_game import TextArenaGame
    from agentfly.environments.games.textworld_game import TextWorldGame

__all__ = [
    "ChessPuzzle", "FrozenLake", "GameEnvironment", "GymnasiumEnvironment", "OpenEnvEnvironment", "ReasoningGym",
    "Sokoban", "TextArenaGame", "TextGame", "TextWorldGame", "VisualGymnasium", "lichess_tasks",
]  # fmt: skip
_MODULES = {
    "ChessPuzzle": "chess_puzzle", "FrozenLake": "frozen_lake", "GameEnvironment": "game",
    "GymnasiumEnvironment": "gymnasium_env", "OpenEnvEnvironment": "openenv_env", "ReasoningGym": "reasoning_gym",
    "Sokoban": "sokoban", "TextArenaGame": "textarena_game", "TextGame": "game", "TextWorldGame": "textworld_game",
    "VisualGymnasium": "gymnasium_env", "lichess_tasks": "chess_puzzle",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
