"""The packages that the shop needs beyond the core, and what to say where they are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentfly.errors import ConfigError


@contextmanager
def needed() -> Iterator[None]:
    """Around imports of what the extra brings."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"the web shop needs {error.name}: pip install 'agentfly[webshop]'") from error
