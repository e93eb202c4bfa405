"""Repository repair: packages with a bug, in the sandbox, judged by hidden tests."""

from agentfly.environments.repair.environment import Repair
from agentfly.environments.repair.judge import RepairJudge
from agentfly.environments.repair.sdist import package_tasks

__all__ = ["Repair", "RepairJudge", "package_tasks"]
