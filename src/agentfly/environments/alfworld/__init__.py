"""ALFWorld: the household games of the benchmark, in an interpreter of our own or in the official engine."""

from agentfly.environments.alfworld.official import official_tasks
from agentfly.environments.alfworld.world import ALFWorld, ALFWorldUpstream

__all__ = ["ALFWorld", "ALFWorldUpstream", "official_tasks"]
