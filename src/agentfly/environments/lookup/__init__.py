"""Questions that take two lookups: the task that the model `tiny` is trained on."""

from agentfly.environments.lookup.environment import Lookup

__all__ = ["Lookup"]
