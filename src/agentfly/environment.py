"""The contract of a stateful world.

An environment is a plain class. Its `@tool` methods are its actions. The resource manager makes the instances: it calls
`start` once, `reset` before each chain, and `close` at the end; nobody else does.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import ClassVar

from agentfly.errors import ConfigError
from agentfly.types import Task


class Environment:
    """A world that one chain at a time acts in. The constructor takes no arguments and does nothing slow."""

    start_timeout: ClassVar[float] = 300.0
    """Seconds that `start` may take."""
    reset_timeout: ClassVar[float] = 60.0
    """Seconds that `reset` and `close` may each take."""

    async def start(self) -> None:
        """Make the world ready. Slow work goes here; called once for each instance."""

    async def reset(self, task: Task) -> None:
        """Set the world up for a task. Called before every chain, on a started instance."""

    async def close(self) -> None:
        """Release everything. Called once, also after a failed start or reset."""


def refuse_unmakable(kind: type[Environment]) -> None:
    """Find out before the first chain that nobody could make an instance."""
    needed = [
        p.name
        for p in inspect.signature(kind).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"{kind.__name__}() needs {', '.join(needed)}, which nobody could give it; "
            "give them defaults, or set a chain's world up in reset(task)"
        )


def meant(kind: type[Environment], used: Iterable[type[Environment]], asker: str) -> type[Environment]:
    """The type that `asker` means by `kind`: the subclass of it that is in use, or `kind` itself where none is."""
    fitting = {each for each in used if issubclass(each, kind)}
    closest = [each for each in fitting if not any(other is not each and issubclass(other, each) for other in fitting)]
    if len(closest) > 1:
        names = ", ".join(sorted(each.__name__ for each in closest))
        raise ConfigError(f"{asker} asks for {kind.__name__}, which may be any of {names}; ask for one of these")
    if not closest and kind is Environment:
        raise ConfigError(f"{asker} asks for an Environment, but no tool acts in one; ask for the class you mean")
    return closest[0] if closest else kind
