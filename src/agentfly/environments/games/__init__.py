"""Games: frozen lake and Sokoban are built in; adapters for other packages need an extra each."""

from agentfly.environments.games.chess_puzzle import ChessPuzzle
from agentfly.environments.games.frozen_lake import FrozenLake
from agentfly.environments.games.game import GameEnvironment, TextGame
from agentfly.environments.games.gymnasium_env import GymnasiumEnvironment
from agentfly.environments.games.openenv_env import OpenEnvEnvironment
from agentfly.environments.games.reasoning_gym import ReasoningGym
from agentfly.environments.games.sokoban import Sokoban
from agentfly.environments.games.textarena_game import TextArenaGame
from agentfly.environments.games.textworld_game import TextWorldGame

__all__ = [
    "ChessPuzzle",
    "FrozenLake",
    "GameEnvironment",
    "GymnasiumEnvironment",
    "OpenEnvEnvironment",
    "ReasoningGym",
    "Sokoban",
    "TextArenaGame",
    "TextGame",
    "TextWorldGame",
]
