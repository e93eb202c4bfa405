"""The one place that makes, lends and buries environment instances.

A chain asks its `Leases` for an environment type. The first asking makes an instance; every later one, by any tool or
reward of that chain, gets the same. What was lent is closed when the chain's leases are released, however it ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar, cast

from agentfly.environment import Environment
from agentfly.errors import EnvironmentFault, describe
from agentfly.threads import call
from agentfly.types import Task

E = TypeVar("E", bound=Environment)
_LOG = logging.getLogger(__name__)


class ResourceManager:
    """Makes an instance in this process for every lease."""

    def __init__(self) -> None:
        self.live = 0
        """Instances made and not yet closed."""

    def leases(self, task: Task) -> Leases:
        """The leases of one chain; use it as an async context manager."""
        return Leases(self, task)

    async def start(self, kind: type[E], task: Task) -> E:
        """A started instance, set up for `task`."""
        try:
            instance = kind()
        except Exception as error:
            raise EnvironmentFault(f"{kind.__name__}() failed: {describe(error)}") from error
        self.live += 1
        try:
            await self._step(instance, "start", kind.start_timeout)
            await self._step(instance, "reset", kind.reset_timeout, task)
        except BaseException:
            try:
                await self.bury(instance)
            except EnvironmentFault as fault:  # what broke first is what is raised
                _LOG.warning("after a failed start: %s", fault)
            raise
        return instance

    async def bury(self, *instances: Environment) -> None:
        """Close instances for good, and see it through even when the caller is cancelled meanwhile, and again."""
        closings = [asyncio.ensure_future(self._step(each, "close", type(each).reset_timeout)) for each in instances]
        for closing in closings:
            closing.add_done_callback(self._count_closed)
        cancelled: asyncio.CancelledError | None = None
        while waiting := [closing for closing in closings if not closing.done()]:
            try:
                await asyncio.wait(waiting)
            except asyncio.CancelledError as error:
                cancelled = error
        faults = [fault for c in closings if not c.cancelled() and (fault := c.exception()) is not None]
        if faults and cancelled is None:
            raise faults[0]
        for fault in faults:
            _LOG.warning("while a chain was cancelled: %s", fault)
        if cancelled is not None:
            raise cancelled

    def _count_closed(self, _: asyncio.Future[None]) -> None:
        self.live -= 1

    async def _step(self, instance: Environment, method: str, timeout: float, *args: Any) -> None:
        name = f"{type(instance).__name__}.{method}"
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                await call(getattr(instance, method), *args)
        except EnvironmentFault:
            raise
        except Exception as error:
            wrong = f"took longer than {timeout:g} s" if limit.expired() else f"failed: {describe(error)}"
            raise EnvironmentFault(f"{name} {wrong}") from error


class Leases:
    """What one chain has been lent."""

    __slots__ = ("_held", "_manager", "_starting", "_task")

    def __init__(self, manager: ResourceManager, task: Task) -> None:
        self._manager, self._task = manager, task
        self._held: dict[type[Environment], Environment] = {}
        self._starting: asyncio.Lock | None = None
        """Made by the first who asks: most chains that have no environment have no need of it."""

    async def get(self, kind: type[E]) -> E:
        """The chain's instance of `kind`: the one it has, or a fresh one."""
        if kind not in self._held:
            self._starting = self._starting or asyncio.Lock()
            async with self._starting:
                if kind not in self._held:
                    self._held[kind] = await self._manager.start(kind, self._task)
        return cast("E", self._held[kind])

    async def release(self) -> None:
        """Give everything back. The first fault is raised once all of it is back."""
        held, self._held = self._held, {}
        if held:
            await self._manager.bury(*held.values())

    async def __aenter__(self) -> Leases:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.release()
        except EnvironmentFault as fault:
            if kind is None:
                raise
            _LOG.warning("while a chain was given up: %s", fault)
