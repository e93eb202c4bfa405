"""Games: a frozen lake and Sokoban, built in; and adapters for the games of other packages, each in an extra."""

from agentfly.environments.games.chess_puzzle import ChessPuzzle
from agentfly.environments.games.frozen_lake import FrozenLake
from agentfly.environments.games.game import Game, TextGame
from agentfly.environments.games.gymnasium_world import GymnasiumWorld
from agentfly.environments.games.openenv_world import OpenEnvWorld
from agentfly.environments.games.reasoning_gym import ReasoningGym
from agentfly.environments.games.sokoban import Sokoban
from agentfly.environments.games.textarena_game import TextArenaGame
from agentfly.environments.games.textworld_game import TextWorldGame

__all__ = [
    "ChessPuzzle",
    "FrozenLake",
    "Game",
    "GymnasiumWorld",
    "OpenEnvWorld",
    "ReasoningGym",
    "Sokoban",
    "TextArenaGame",
    "TextGame",
    "TextWorldGame",
]
