"""Environment instances: who lends them, and where they live."""

from agentfly.resources.figures import Figures
from agentfly.resources.leases import Group, Leases
from agentfly.resources.manager import ResourceManager
from agentfly.resources.stock import QueueTimeout

__all__ = ["Figures", "Group", "Leases", "QueueTimeout", "ResourceManager"]
