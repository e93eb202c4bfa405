"""The contract of a stateful world.

An environment is a plain class. Its `@tool` methods are its actions. The resource manager makes the instances: it calls
`start` once, `reset` before each chain, and `close` at the end; nobody else does.
"""

from __future__ import annotations

from typing import ClassVar

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
