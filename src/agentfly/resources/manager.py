"""The one place that makes, lends and buries environment instances.

A chain asks its `Leases` for an environment type. The first asking makes an instance; every later one, by any tool or
reward of that chain, gets the same. What was lent is closed when the chain's leases are released, however it ended.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar, cast

from agentfly.environment import Environment
from agentfly.errors import EnvironmentFault
from agentfly.threads import call
from agentfly.types import Task

E = TypeVar("E", bound=Environment)


class ResourceManager:
    """Makes an instance in this process for every lease."""

    def __init__(self) -> None:
        self._closing: set[asyncio.Task[None]] = set()
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
            raise EnvironmentFault(f"{kind.__name__}() failed: {type(error).__name__}: {error}") from error
        self.live += 1
        try:
            await self._step(instance, "start", kind.start_timeout)
            await self._step(instance, "reset", kind.reset_timeout, task)
        except BaseException:
            await self.bury(instance)
            raise
        return instance

    async def bury(self, instance: Environment) -> None:
        """Close an instance for good, and see it through even when the caller is cancelled meanwhile."""
        closing = asyncio.ensure_future(self._close(instance))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def _close(self, instance: Environment) -> None:
        try:
            await self._step(instance, "close", type(instance).reset_timeout)
        finally:
            self.live -= 1

    async def _step(self, instance: Environment, method: str, timeout: float, *args: Any) -> None:
        name = f"{type(instance).__name__}.{method}"
        try:
            async with asyncio.timeout(timeout):
                await call(getattr(instance, method), *args)
        except TimeoutError as error:
            raise EnvironmentFault(f"{name} took longer than {timeout:g} s") from error
        except EnvironmentFault:
            raise
        except Exception as error:
            raise EnvironmentFault(f"{name} failed: {type(error).__name__}: {error}") from error


class Leases:
    """What one chain has been lent."""

    __slots__ = ("_acting", "_held", "_manager", "_starting", "_task")

    def __init__(self, manager: ResourceManager, task: Task) -> None:
        self._manager, self._task = manager, task
        self._held: dict[type[Environment], Environment] = {}
        self._starting = asyncio.Lock()
        self._acting: dict[type[Environment], asyncio.Lock] = {}

    async def get(self, kind: type[E]) -> E:
        """The chain's instance of `kind`: the one it has, or a fresh one."""
        if kind not in self._held:
            async with self._starting:
                if kind not in self._held:
                    self._held[kind] = await self._manager.start(kind, self._task)
        return cast("E", self._held[kind])

    def acting(self, kind: type[Environment]) -> asyncio.Lock:
        """Held by whoever acts on the chain's instance of `kind`, so that actions happen one after another."""
        return self._acting.setdefault(kind, asyncio.Lock())

    async def release(self) -> None:
        """Give everything back. The first fault is raised once all of it is back."""
        held, self._held = self._held, {}
        ends = await asyncio.gather(*(self._manager.bury(e) for e in held.values()), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def __aenter__(self) -> Leases:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.release()
        except EnvironmentFault as fault:
            if kind is None:
                raise
            logging.getLogger(__name__).warning("while a chain was given up: %s", fault)
