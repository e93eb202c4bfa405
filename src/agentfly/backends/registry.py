"""The backends by name. Each is imported when it is asked for, since some are heavy."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from agentfly.backends.base import Backend
from agentfly.errors import ConfigError, install_command

BACKENDS = {
    "async_vllm": ("agentfly.backends.vllm", "VLLMBackend"),
    "client": ("agentfly.backends.client", "ClientBackend"),
    "fleet": ("agentfly.backends.fleet", "FleetBackend"),
    "scripted": ("agentfly.backends.scripted", "ScriptedBackend"),
    "transformers": ("agentfly.backends.engine", "EngineBackend"),
    "vllm": ("agentfly.backends.vllm", "VLLMBackend"),
}
"""The module and class of each backend that `backend=` accepts by name."""


def find_backend(name: str) -> type[Backend]:
    """The class of a backend. Raises ConfigError if there is none of that name, or its package is not installed."""
    if name not in BACKENDS:
        close = difflib.get_close_matches(name, BACKENDS, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}.{hint}")
    module, attribute = BACKENDS[name]
    try:
        backend_class: type[Backend] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        extra = {"torch": "train", "vllm": "vllm"}.get(error.name or "")
        if extra is None:
            raise
        raise ConfigError(f"backend {name!r} needs {error.name}: {install_command(extra)}") from error
    return backend_class


def open_backend(name: str, **settings: Any) -> Backend:
    """The backend of that name with those settings."""
    factory = find_backend(name)
    try:
        return factory(**settings)
    except TypeError as error:
        problem = str(error).partition("() ")[2] or str(error)
        raise ConfigError(f"backend {name!r}, backend_config: {problem}") from error
