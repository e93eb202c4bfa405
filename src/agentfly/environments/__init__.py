"""The prebuilt environments, and by name those of other installed packages.

Each has its folder with everything it needs: environment, tasks, rewards, expert, recipe. A class is imported on first
use. Importing this module imports no environment. Nothing outside this package imports one: everything finds them by
entry point (`agentfly.plugins`), as an attribute of this module does. The imports below are for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentfly import plugins

if TYPE_CHECKING:
    from agentfly.environments.alfworld import ALFWorld as ALFWorld
    from agentfly.environments.code_interpreter import CodeInterpreter as CodeInterpreter
    from agentfly.environments.code_judge import CodeJudge as CodeJudge
    from agentfly.environments.games.chess_puzzle import ChessPuzzle as ChessPuzzle
    from agentfly.environments.games.frozen_lake import FrozenLake as FrozenLake
    from agentfly.environments.games.gymnasium_env import GymnasiumEnvironment as GymnasiumEnvironment
    from agentfly.environments.games.gymnasium_env import VisualGymnasium as VisualGymnasium
    from agentfly.environments.games.openenv_env import OpenEnvEnvironment as OpenEnvEnvironment
    from agentfly.environments.games.reasoning_gym import ReasoningGym as ReasoningGym
    from agentfly.environments.games.sokoban import Sokoban as Sokoban
    from agentfly.environments.games.textarena_game import TextArenaGame as TextArenaGame
    from agentfly.environments.games.textworld_game import TextWorldGame as TextWorldGame
    from agentfly.environments.image_qa import ImageQA as ImageQA
    from agentfly.environments.judge import Judge as Judge
    from agentfly.environments.lookup import Lookup as Lookup
    from agentfly.environments.math import MathJudge as MathJudge
    from agentfly.environments.math import MathWithPython as MathWithPython
    from agentfly.environments.miniwob import MiniWoB as MiniWoB
    from agentfly.environments.model_server import ModelServer as ModelServer
    from agentfly.environments.programs import ProgramSynthesis as ProgramSynthesis
    from agentfly.environments.rooms import FindDigit as FindDigit
    from agentfly.environments.rooms import Rooms as Rooms
    from agentfly.environments.scienceworld import ScienceWorld as ScienceWorld
    from agentfly.environments.search import Search as Search
    from agentfly.environments.shell import Shell as Shell
    from agentfly.environments.sql import SQL as SQL
    from agentfly.environments.task_folders import TaskFolder as TaskFolder
    from agentfly.environments.webshop import VisualWebShop as VisualWebShop
    from agentfly.environments.webshop import WebShop as WebShop


def __getattr__(name: str) -> Any:
    return plugins.load_attribute(plugins.ENVIRONMENTS, __name__, name)


def __dir__() -> list[str]:
    return [plugin.name for plugin in plugins.list_plugins(plugins.ENVIRONMENTS)]
