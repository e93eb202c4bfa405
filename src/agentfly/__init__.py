"""AgentFly: train language-model agents with reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfly.environment import Environment, Pool
    from agentfly.scoring import reward
    from agentfly.tooling import tool
    from agentfly.types import Task

__all__ = ["Environment", "Pool", "Task", "reward", "tool"]

_HOMES = {"Environment": "environment", "Pool": "environment", "Task": "types", "reward": "scoring", "tool": "tooling"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line answers at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'agentfly' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(f"agentfly.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
