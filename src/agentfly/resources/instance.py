"""One environment instance, from its making to its end."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from agentfly.environment import Environment, Housed
from agentfly.errors import EnvironmentFault, describe
from agentfly.resources.figures import Holder, Lent
from agentfly.threads import call

_numbers = itertools.count(1)


class Instance:
    """An instance, what it lives in, and who has it."""

    __slots__ = (
        "_turns", "holders", "housed", "idle_since", "kind", "lent_at", "number", "resting", "spoiled", "uses",
    )  # fmt: skip

    def __init__(self, kind: type[Environment], housed: Housed) -> None:
        self.kind, self.housed = kind, housed
        self.number = next(_numbers)
        self.uses = 0
        self.holders: list[Holder] = []
        """Those who have it; more than one only where it is shared."""
        self.idle_since = self.lent_at = time.monotonic()
        self.spoiled = ""
        """Why it must not be lent again; empty while it may be."""
        self.resting: asyncio.Task[None] | None = None
        """What put it to rest; None while it is awake."""
        self._turns: asyncio.Lock | None = None

    def __repr__(self) -> str:
        return f"<{self.kind.__name__} {self.number}>"

    @property
    def environment(self) -> Environment:
        return self.housed.environment

    @property
    def turns(self) -> asyncio.Lock:
        """For those who share it and must not act at once."""
        self._turns = self._turns or asyncio.Lock()
        return self._turns

    @property
    def lent(self) -> Lent:
        """The lease as others may see it."""
        return Lent(self.number, tuple(self.holders), time.monotonic() - self.lent_at)

    async def step(self, method: str, timeout: float, *args: Any) -> None:
        """Call one of the contract's methods, within its time; whatever goes wrong is an EnvironmentFault."""
        await self._within(timeout, method, getattr(self.environment, method), *args)

    async def rest(self, timeout: float) -> None:
        """Put it to rest; where that fails it is not lent again."""
        try:
            await self._within(timeout, "rest", self.housed.rest)
        except EnvironmentFault as fault:
            self.spoiled = str(fault)

    async def wake(self, timeout: float) -> None:
        """Wake it. Of several who are lent it at once, one does, and the others wait for that."""
        async with self.turns:
            if self.resting is not None and not self.spoiled:
                await self.resting
                await self._within(timeout, "wake", self.housed.wake)
                self.resting = None

    async def _within(self, timeout: float, name: str, method: Callable[..., Any], *args: Any) -> None:
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                await call(method, *args)
        except EnvironmentFault:
            raise
        except Exception as error:
            wrong = f"took longer than {timeout:g} s" if limit.expired() else f"failed: {describe(error)}"
            raise EnvironmentFault(f"{self.kind.__name__}.{name} {wrong}") from error
