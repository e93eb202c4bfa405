"""Task folders of Harbor and Terminal-Bench 2 as an environment: a shell, files, and the task's own verifier."""

from agentfly.environments.task_folders.environment import SHIPPED, TaskFolder, verified

__all__ = ["SHIPPED", "TaskFolder", "verified"]
