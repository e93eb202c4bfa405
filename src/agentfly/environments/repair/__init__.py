"""Repository repair: Python packages with one bug each, scored by hidden tests in the sandbox."""

from agentfly.environments.repair.environment import Repair
from agentfly.environments.repair.judge import RepairJudge
from agentfly.environments.repair.tasks import package_tasks

__all__ = ["Repair", "RepairJudge", "package_tasks"]
