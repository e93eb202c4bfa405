"""ScienceWorld: elementary experiments in text, in the simulator of the benchmark's authors."""

from agentfly.environments.scienceworld.tasks import official_tasks
from agentfly.environments.scienceworld.world import ScienceWorld

__all__ = ["ScienceWorld", "official_tasks"]
