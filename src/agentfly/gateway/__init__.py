"""The gateway: agents written with other packages talk to it by HTTP, and what they do is recorded as chains."""

from agentfly.gateway.gateway import Gateway

__all__ = ["Gateway"]
