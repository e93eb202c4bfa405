"""The prebuilt worlds."""

from agentfly.environments.alfworld import ALFWorld, ALFWorldUpstream
from agentfly.environments.code_interpreter import CodeInterpreter
from agentfly.environments.code_judge import CodeJudge
from agentfly.environments.games import (
    ChessPuzzle,
    FrozenLake,
    GymnasiumEnvironment,
    OpenEnvEnvironment,
    ReasoningGym,
    Sokoban,
    TextArenaGame,
    TextWorldGame,
)
from agentfly.environments.judge import Judge
from agentfly.environments.math import MathJudge, MathWithPython
from agentfly.environments.model_server import ModelServer
from agentfly.environments.programs import ProgramSynthesis
from agentfly.environments.repair import Repair, RepairJudge
from agentfly.environments.scienceworld import ScienceWorld
from agentfly.environments.search.environment import Search
from agentfly.environments.shell import Shell
from agentfly.environments.sql import SQL
from agentfly.environments.webshop import WebShop

__all__ = [
    "SQL",
    "ALFWorld",
    "ALFWorldUpstream",
    "ChessPuzzle",
    "CodeInterpreter",
    "CodeJudge",
    "FrozenLake",
    "GymnasiumEnvironment",
    "Judge",
    "MathJudge",
    "MathWithPython",
    "ModelServer",
    "OpenEnvEnvironment",
    "ProgramSynthesis",
    "ReasoningGym",
    "Repair",
    "RepairJudge",
    "ScienceWorld",
    "Search",
    "Shell",
    "Sokoban",
    "TextArenaGame",
    "TextWorldGame",
    "WebShop",
]
