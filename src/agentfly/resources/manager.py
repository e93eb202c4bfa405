"""The one place that starts, lends, queues, recycles and buries environment instances.

A chain asks its `Leases` for an environment type and gets an instance; every tool and reward of that chain gets the
same one; it goes back when the chain has ended and its reward has seen it, however the chain ended. How the instances
of an environment are kept is declared by its `pool`, or for one manager by `ResourceManager(pools={Counter: Pool(…)})`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from agentfly.environment import Environment, Housed, Place, Pool
from agentfly.errors import ConfigError
from agentfly.resources.budget import Budget
from agentfly.resources.exchange import Exchange
from agentfly.resources.figures import Figures
from agentfly.resources.leases import Group, Leases, Lender
from agentfly.resources.stock import Stock
from agentfly.types import Task


class Here:
    """Instances in this process."""

    name = "here"
    max_instances = None

    async def house(self, kind: type[Environment]) -> Housed:
        """The environment itself."""
        return Housed(kind())


PLACES = {
    "here": f"{__name__}:Here",
    "process": "agentfly.resources.process:Process",
    "ray": "agentfly.resources.on_ray:OnRay",
    "sandbox": "agentfly.resources.sandboxed:Sandboxed",
}
"""Places by name; those with settings of their own are given as objects."""


class ResourceManager:
    """Lends instances to chains. Those of one event loop form one pool of each kind; when the loop ends, so do they."""

    def __init__(
        self,
        pools: Mapping[type[Environment], Pool] | None = None,
        *,
        instances: int | None = None,
        memory: int | None = None,
    ) -> None:
        """`pools`: settings that go before the environments' own. `instances`, `memory` (bytes): what all may use."""
        self.pools = dict(pools or {})
        for kind, pool in self.pools.items():
            if not (inspect.isclass(kind) and issubclass(kind, Environment)) or not isinstance(pool, Pool):
                raise ConfigError(f"pools= maps environment classes to Pool(…), not {kind!r} to {pool!r}")
        for name, value in (("instances", instances), ("memory", memory)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, or None for no limit, not {value!r}")
        self.budget = Budget(instances, memory)
        self._exchanges: dict[asyncio.AbstractEventLoop, Exchange] = {}

    @property
    def live(self) -> int:
        """Instances made and not yet closed."""
        return sum(exchange.count for exchange in list(self._exchanges.values()))

    def figures(self) -> list[Figures]:
        """Every pool as it is."""
        return [figures for exchange in list(self._exchanges.values()) for figures in exchange.figures()]

    def metrics(self) -> dict[str, float]:
        """The figures as flat numbers, such as `Counter/waiting`."""
        return {name: value for each in self.figures() for name, value in each.metrics.items()}

    def leases(
        self, task: Task, plan: Iterable[type[Environment]] = (), *, group: Group | None = None, chain: str = ""
    ) -> Leases:
        """The leases of one chain; use it as an async context manager.

        `plan` are the environments that the chain may need. All are acquired at once when the first is touched.
        """
        return Leases(self._lender, task, plan, group, chain)

    def group(self) -> Group:
        """What the chains of one task share."""
        return Group(self._lender)

    async def warm_up(self, kinds: Iterable[type[Environment]]) -> None:
        """Begin to start what these environments' pools keep warm, and go on without waiting for it."""
        await self._exchange.live()
        self._exchange.prepare(kinds)

    async def close(self) -> None:
        """End every instance of this event loop. The manager can be used again after that."""
        loop = asyncio.get_running_loop()
        if loop in self._exchanges:
            await self._exchanges[loop].end()
            self._exchanges.pop(loop, None)

    @property
    def _lender(self) -> Lender:
        return self._exchange

    @property
    def _exchange(self) -> Exchange:
        loop = asyncio.get_running_loop()
        if loop not in self._exchanges:
            # An exchange refers to its loop, so a weak mapping would never let either go.
            for closed in [known for known in list(self._exchanges) if known.is_closed()]:
                self._exchanges.pop(closed, None)
            self._exchanges[loop] = Exchange(self.budget, self._open)
        return self._exchanges[loop]

    def _open(self, kind: type[Environment]) -> Stock:
        pool = self.pools.get(kind, kind.pool)
        if not isinstance(pool, Pool):
            settings = ", ".join(field.name for field in fields(Pool))
            raise ConfigError(f"{kind.__name__}.pool is {pool!r}; write pool = Pool(…) with any of {settings}")
        return Stock(kind, pool, place_of(pool.place))


def place_of(given: Place | str) -> Place:
    """The place that a pool names."""
    if not isinstance(given, str):
        if not callable(getattr(given, "house", None)):
            raise ConfigError(
                f"{given!r} is no place; there are {', '.join(PLACES)}, or an object such as Container(…)"
            )
        return given
    if given not in PLACES:
        raise ConfigError(f"there is no place {given!r}; there are {', '.join(PLACES)}, or give a Place")
    module, _, name = PLACES[given].partition(":")
    found: Any = getattr(importlib.import_module(module), name)
    place: Place = found()
    return place
