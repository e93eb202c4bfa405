"""One environment instance, from creation to termination."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from agentfly.environment import Environment, InstanceHandle
from agentfly.errors import EnvironmentFault, describe
from agentfly.resources.metrics import Holder, LeaseInfo
from agentfly.threads import call, run_within

_numbers = itertools.count(1)


class Instance:
    """An environment instance with its runtime handle and its lease holders."""

    __slots__ = (
        "_lock", "env_class", "evict_reason", "handle", "holders", "idle_since", "leased_at", "number", "pausing",
        "uses",
    )  # fmt: skip

    def __init__(self, env_class: type[Environment], handle: InstanceHandle) -> None:
        self.env_class = env_class
        self.handle = handle
        self.number = next(_numbers)
        self.uses = 0
        self.holders: list[Holder] = []
        """Current lease holders; more than one only for a shared instance."""
        self.idle_since = self.leased_at = time.monotonic()
        self.evict_reason = ""
        """Why it must not be leased again; empty while it may be."""
        self.pausing: asyncio.Task[None] | None = None
        """The task that paused it; None while it is running."""
        self._lock: asyncio.Lock | None = None

    def __repr__(self) -> str:
        return f"<{self.env_class.__name__} {self.number}>"

    @property
    def environment(self) -> Environment:
        return self.handle.environment

    @property
    def lock(self) -> asyncio.Lock:
        """Serializes the actions of chains that share the instance."""
        self._lock = self._lock or asyncio.Lock()
        return self._lock

    @property
    def lease_info(self) -> LeaseInfo:
        return LeaseInfo(self.number, tuple(self.holders), time.monotonic() - self.leased_at)

    async def step(self, method: str, timeout: float, *args: Any) -> Any:
        """Call a method such as `reset` with a timeout in seconds. Every failure is an EnvironmentFault."""
        return await self._call(timeout, method, getattr(self.environment, method), *args)

    async def pause(self, timeout: float) -> None:
        """Pause it. If that fails it is not leased again."""
        try:
            await self._call(timeout, "pause", self.handle.pause)
        except EnvironmentFault as fault:
            self.evict_reason = str(fault)

    async def resume(self, timeout: float) -> None:
        """Resume it. If several chains lease it at once, one resumes it and the others wait."""
        async with self.lock:
            if self.pausing is not None and not self.evict_reason:
                await self.pausing
                await self._call(timeout, "resume", self.handle.resume)
                self.pausing = None

    async def _call(self, timeout: float, name: str, method: Callable[..., Any], *args: Any) -> Any:
        limit = asyncio.timeout(timeout)
        try:
            return await run_within(limit, call(method, *args))
        except EnvironmentFault:
            raise
        except Exception as error:
            reason = f"took longer than {timeout:g} s" if limit.expired() else f"failed: {describe(error)}"
            raise EnvironmentFault(f"{self.env_class.__name__}.{name} {reason}") from error
