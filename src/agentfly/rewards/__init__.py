"""The prebuilt rewards.

Rewards of an environment are imported on first use, by attribute or by name: importing this package loads no
environment module.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from agentfly.rewards.answers import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format, qa_f1_tool
from agentfly.rewards.composition import gate, product
from agentfly.rewards.format import answer_format, format_reward, length_reward, think_format
from agentfly.scoring import REWARDS

_MODULES = {
    "agentfly.environments.alfworld.rewards": ("alfworld_episode_reward", "alfworld_won"),
    "agentfly.environments.games.rewards": ("game_score", "game_won", "reasoning_gym_score"),
    "agentfly.environments.scienceworld.rewards": (
        "scienceworld_episode_reward",
        "scienceworld_progress",
        "scienceworld_score",
    ),
    "agentfly.environments.webshop.rewards": ("webshop_reward",),
    "agentfly.rewards.code": ("output_match", "unit_tests"),
    "agentfly.rewards.judge": ("llm_as_judge_math_reward", "llm_as_judge_reward", "llm_judge"),
    "agentfly.rewards.math": ("math_equal", "math_equal_think", "math_equal_think_tool", "math_equal_tool"),
    "agentfly.rewards.repair": ("repaired", "tests_pass"),
    "agentfly.rewards.shell": ("shell_match", "shell_similarity"),
    "agentfly.rewards.sql": ("sql_iou", "sql_match"),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}
REWARDS.add_lazy(_LAZY)

__all__ = [
    "answer_format",
    "format_reward",
    "gate",
    "length_reward",
    "product",
    "qa_em",
    "qa_em_format",
    "qa_em_tool",
    "qa_f1",
    "qa_f1_format",
    "qa_f1_tool",
    "think_format",
]
__all__ += list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
