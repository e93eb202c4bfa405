"""The general rewards, and by name those of environments.

A reward of an environment is found by its entry point (group `agentfly.rewards`) and imported on first use, as an
attribute of this module or by its name. Importing this module imports no environment.
"""

from __future__ import annotations

from typing import Any

from agentfly import plugins
from agentfly.rewards.answers import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format, qa_f1_tool
from agentfly.rewards.composition import gate, product
from agentfly.rewards.format import answer_format, format_reward, length_reward, overlong_penalty, think_format

__all__ = [
    "answer_format", "format_reward", "gate", "length_reward", "overlong_penalty", "product", "qa_em",
    "qa_em_format", "qa_em_tool", "qa_f1", "qa_f1_format", "qa_f1_tool", "think_format",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return plugins.load_attribute(plugins.REWARDS, __name__, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(plugin.name for plugin in plugins.list_plugins(plugins.REWARDS))})
