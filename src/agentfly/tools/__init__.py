"""The general tools, and by name those of environments.

A tool of an environment is found by its entry point (group `agentfly.tools`) and imported on first use, as an
attribute of this module or by its name. Importing this module imports no environment.
"""

from __future__ import annotations

from typing import Any

from agentfly import plugins
from agentfly.tools.general import answer, answer_math, answer_qa, calculate, calculator

__all__ = ["answer", "answer_math", "answer_qa", "calculate", "calculator"]


def __getattr__(name: str) -> Any:
    return plugins.load_attribute(plugins.TOOLS, __name__, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(plugin.name for plugin in plugins.list_plugins(plugins.TOOLS))})
