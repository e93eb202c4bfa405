"""Models by name: prepared models that need no hub, local folders, and names on the Hugging Face hub."""

from agentfly.models.cache import PreparedModel, find_fault, prepare_model
from agentfly.models.prepared import PREPARED, get_model, resolve

__all__ = ["PREPARED", "PreparedModel", "find_fault", "get_model", "prepare_model", "resolve"]
