"""ScienceWorld: elementary-school science experiments in text, run by the simulator of the benchmark's authors."""

from agentfly.environments.scienceworld.environment import ScienceWorld
from agentfly.environments.scienceworld.tasks import official_tasks

__all__ = ["ScienceWorld", "official_tasks"]
