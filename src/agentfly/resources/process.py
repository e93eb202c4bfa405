"""`Pool(place="process")`: every instance in a worker process of its own.

What an environment does there (crashes, leaks, holding the interpreter's lock) hurts no other chain, and ends with it.
"""

from __future__ import annotations

import os
import sys

from agentfly.environment import Environment, Housed
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.keeper import Worker, keeper
from agentfly.resources.remote.line import Line
from agentfly.resources.remote.stand_in import stand_in
from agentfly.resources.sandbox.inside import tree


class Process:
    """Instances in worker processes of this machine, which see the files and settings that this process sees."""

    name = "process"

    def __init__(self) -> None:
        self.max_instances: int | None = max(8, 4 * (os.cpu_count() or 1))

    async def house(self, kind: type[Environment]) -> Housed:
        """Make an instance in a fresh worker."""
        if not hasattr(os, "fork"):
            raise ConfigError(f"place='process' needs a system that can fork, which {sys.platform} cannot; use 'here'")
        try:
            worker = keeper().open(load="agentfly.tooling" if kind.__module__ != "__main__" else "agentfly")
        except OSError as error:
            raise EnvironmentFault(f"no worker process for {kind.__name__}: {error}") from error
        line = None
        try:
            line = await Line.over(worker.line, worker.over)
            return _Worked(await stand_in(kind, line), worker, line)
        except BaseException:
            worker.drop()
            (line or worker.line).close()
            raise


class _Worked(Housed):
    """An instance in a worker process."""

    def __init__(self, environment: Environment, worker: Worker, line: Line) -> None:
        super().__init__(environment)
        self._worker, self._line = worker, line

    def death(self) -> str | None:
        """How its process ended; None while it runs."""
        return self._line.broken or self._worker.ended()

    def memory(self) -> int | None:
        """Bytes that its process and all below it hold; what they share with others counts in part."""
        guardian = self._worker.guardian
        if guardian is None or sys.platform != "linux":
            return None
        return tree.memory([guardian, *tree.descendants(guardian)], 0)

    async def end(self) -> None:
        """Kill its process and all below it. They are as good as dead even where this is cut short."""
        self._worker.end()
        self._line.close()
        try:
            await self._worker.over()
        finally:
            self._worker.drop()
