"""Where environment instances come from."""

from agentfly.resources.manager import Leases, ResourceManager

__all__ = ["Leases", "ResourceManager"]
