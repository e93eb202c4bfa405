"""AgentFly: train language-model agents with reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfly.agents import ActionAgent, BaseAgent, CodeAgent, HFAgent, ReactAgent
    from agentfly.data import load_trajectories, read_tasks, save_trajectories
    from agentfly.environment import Environment, Pool
    from agentfly.errors import AgentFlyError, ConfigError, EnvironmentFault
    from agentfly.evaluation import evaluate
    from agentfly.resources import ResourceManager
    from agentfly.rollout import RunResult
    from agentfly.runs import RunDirectory
    from agentfly.scoring import reward
    from agentfly.templates import load_template
    from agentfly.tooling import Context, tool
    from agentfly.training import TrainConfig, train
    from agentfly.trajectory import Trajectory
    from agentfly.types import Image, Message, Sampling, Task, ToolCall

__version__ = "0.1.0"

__all__ = [
    "ActionAgent",
    "AgentFlyError",
    "BaseAgent",
    "CodeAgent",
    "ConfigError",
    "Context",
    "Environment",
    "EnvironmentFault",
    "HFAgent",
    "Image",
    "Message",
    "Pool",
    "ReactAgent",
    "ResourceManager",
    "RunDirectory",
    "RunResult",
    "Sampling",
    "Task",
    "ToolCall",
    "TrainConfig",
    "Trajectory",
    "evaluate",
    "load_template",
    "load_trajectories",
    "read_tasks",
    "reward",
    "save_trajectories",
    "tool",
    "train",
]

_NAMES = {
    "agents": ("ActionAgent", "BaseAgent", "CodeAgent", "HFAgent", "ReactAgent"),
    "data": ("load_trajectories", "read_tasks", "save_trajectories"),
    "environment": ("Environment", "Pool"),
    "errors": ("AgentFlyError", "ConfigError", "EnvironmentFault"),
    "evaluation": ("evaluate",),
    "resources": ("ResourceManager",),
    "rollout": ("RunResult",),
    "runs": ("RunDirectory",),
    "scoring": ("reward",),
    "templates": ("load_template",),
    "tooling": ("Context", "tool"),
    "training": ("TrainConfig", "train"),
    "trajectory": ("Trajectory",),
    "types": ("Image", "Message", "Sampling", "Task", "ToolCall"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The module under `agentfly` that a public name is imported from, when the name is first used."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'agentfly' has no attribute {name!r}; it has {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(f"agentfly.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
