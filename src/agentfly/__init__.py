"""AgentFly: train language-model agents with reinforcement learning."""

from agentfly.environment import Environment
from agentfly.scoring import reward
from agentfly.tooling import tool
from agentfly.types import Task

__all__ = ["Environment", "Task", "reward", "tool"]
