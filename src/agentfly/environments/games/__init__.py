"""Games: a frozen lake and Sokoban, built in; and adapters for the games of other packages."""

from agentfly.environments.games.frozen_lake import FrozenLake
from agentfly.environments.games.game import Game
from agentfly.environments.games.sokoban import Sokoban

__all__ = ["FrozenLake", "Game", "Sokoban"]
