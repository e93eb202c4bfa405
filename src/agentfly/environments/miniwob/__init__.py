"""MiniWoB++: small web pages with a goal, in a real browser."""

from agentfly.environments.miniwob.environment import TASKS, MiniWoB

__all__ = ["TASKS", "MiniWoB"]
