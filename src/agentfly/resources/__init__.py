"""Environment instances: pools, leases, and the runtimes that instances run in."""

from agentfly.resources.lease import GroupLeases, Leases
from agentfly.resources.manager import ResourceManager
from agentfly.resources.metrics import PoolMetrics
from agentfly.resources.pool import QueueTimeout

__all__ = ["GroupLeases", "Leases", "PoolMetrics", "QueueTimeout", "ResourceManager"]
