"""ALFWorld: the household games of the benchmark, in a fast interpreter."""

from agentfly.environments.alfworld.environment import ALFWorld
from agentfly.environments.alfworld.tasks import official_tasks

__all__ = ["ALFWorld", "official_tasks"]
