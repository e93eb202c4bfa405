"""The prebuilt environments, and by name those of other installed packages.

Each has its folder with everything it needs: environment, tasks, rewards, expert, recipe. A class is imported on first
use. Importing this module imports no environment. Nothing outside this package imports one: the command line, recipes
and the registries find them by entry point (`agentfly.plugins`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        VisualGymnasium,
    )
    from agentfly.environments.image_qa import ImageQA
    from agentfly.environments.judge import Judge
    from agentfly.environments.lookup import Lookup
    from agentfly.environments.math import MathJudge, MathWithPython
    from agentfly.environments.miniwob import MiniWoB
    from agentfly.environments.model_server import ModelServer
    from agentfly.environments.programs import ProgramSynthesis
    from agentfly.environments.repair import Repair, RepairJudge
    from agentfly.environments.rooms import FindDigit, Rooms
    from agentfly.environments.scienceworld import ScienceWorld
    from agentfly.environments.search import Search
    from agentfly.environments.shell import Shell
    from agentfly.environments.sql import SQL
    from agentfly.environments.webshop import VisualWebShop, WebShop

__all__ = [
    "SQL", "ALFWorld", "ALFWorldUpstream", "ChessPuzzle", "CodeInterpreter", "CodeJudge", "FindDigit", "FrozenLake",
    "GymnasiumEnvironment", "ImageQA", "Judge", "Lookup", "MathJudge", "MathWithPython", "MiniWoB", "ModelServer",
    "OpenEnvEnvironment", "ProgramSynthesis", "ReasoningGym", "Repair", "RepairJudge", "Rooms", "ScienceWorld",
    "Search", "Shell", "Sokoban", "TextArenaGame", "TextWorldGame", "VisualGymnasium", "VisualWebShop", "WebShop",
]  # fmt: skip

_NAMES = {
    "alfworld": ("ALFWorld", "ALFWorldUpstream"), "code_interpreter": ("CodeInterpreter",),
    "code_judge": ("CodeJudge",), "image_qa": ("ImageQA",), "judge": ("Judge",), "lookup": ("Lookup",),
    "games": (
        "ChessPuzzle", "FrozenLake", "GymnasiumEnvironment", "OpenEnvEnvironment", "ReasoningGym", "Sokoban",
        "TextArenaGame", "TextWorldGame", "VisualGymnasium",
    ),
    "math": ("MathJudge", "MathWithPython"), "miniwob": ("MiniWoB",), "model_server": ("ModelServer",),
    "programs": ("ProgramSynthesis",), "repair": ("Repair", "RepairJudge"), "rooms": ("FindDigit", "Rooms"),
    "scienceworld": ("ScienceWorld",), "search": ("Search",), "shell": ("Shell",), "sql": ("SQL",),
    "webshop": ("VisualWebShop", "WebShop"),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The module under this package that a prebuilt class is imported from. It repeats the entry points of pyproject.toml
for interpreters without this distribution's metadata, such as those in containers."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    from agentfly import plugins

    return plugins.load_attribute(plugins.ENVIRONMENTS, __name__, name)


def __dir__() -> list[str]:
    return __all__
