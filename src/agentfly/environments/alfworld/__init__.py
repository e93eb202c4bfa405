"""ALFWorld: the household games of the benchmark, in a fast interpreter or in the official engine."""

from agentfly.environments.alfworld.environment import ALFWorld, ALFWorldUpstream
from agentfly.environments.alfworld.tasks import official_tasks

__all__ = ["ALFWorld", "ALFWorldUpstream", "official_tasks"]
