"""The embedded engine: a Hugging Face model in this process, batched continuously, sharing memory with the learner."""

from agentfly.backends.engine.backend import EngineBackend

__all__ = ["EngineBackend"]
