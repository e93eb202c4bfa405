"""The gateway: agents of other packages call the model over HTTP, and their requests are recorded as chains."""

from agentfly.gateway.gateway import Gateway

__all__ = ["Gateway"]
