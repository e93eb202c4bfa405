"""Packages that only an extra brings, and what to say where they are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from agentfly.errors import ConfigError


@contextmanager
def needed(what: str, extra: str, instead: str = "") -> Iterator[None]:
    """Around the imports of what an extra brings: `what` needs it. `instead` says how to do without, if one can."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "a package").partition(".")[0]
        advice = f", or {instead}" if instead else ""
        raise ConfigError(
            f"{what} needs {package}, which is not installed: pip install 'agentfly[{extra}]'{advice}"
        ) from error
