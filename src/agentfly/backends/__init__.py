"""Backends: what samples turns. `open_backend` opens one by name."""

from agentfly.backends.registry import BACKENDS, find_backend, open_backend

__all__ = ["BACKENDS", "find_backend", "open_backend"]
