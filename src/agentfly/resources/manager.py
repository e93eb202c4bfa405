"""ResourceManager: starts, leases, queues, recycles and closes environment instances.

A chain asks its `Leases` for an environment class and gets an instance. Every tool and reward of that chain gets the
same one. The instance is released after the chain has ended and its reward was computed, also on errors. The pool of
an environment is configured by its `pool`, or for one manager by `ResourceManager(pools={Counter: Pool(…)})`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from agentfly.environment import Environment, InstanceHandle, Pool, Runtime
from agentfly.errors import ConfigError
from agentfly.resources.allocator import Allocator
from agentfly.resources.lease import GroupLeases, InstanceProvider, Leases
from agentfly.resources.metrics import PoolMetrics
from agentfly.resources.pool import Budget, PoolState
from agentfly.types import Task


class InProcess:
    """Runtime for instances in this process."""

    name = "in_process"
    max_instances = None

    async def create(self, env_class: type[Environment]) -> InstanceHandle:
        """The environment itself, without a proxy."""
        return InstanceHandle(env_class())


RUNTIMES = {
    "in_process": f"{__name__}:InProcess",
    "process": "agentfly.resources.runtimes.process:ProcessRuntime",
    "ray": "agentfly.resources.runtimes.ray:RayRuntime",
    "sandbox": "agentfly.resources.runtimes.sandbox:SandboxRuntime",
}
"""Runtimes by name. A runtime with settings of its own is passed as an object."""


class ResourceManager:
    """Leases instances to chains. Each event loop has its own pools, which are closed when the loop ends."""

    def __init__(
        self,
        pools: Mapping[type[Environment], Pool] | None = None,
        *,
        instances: int | None = None,
        memory: int | None = None,
    ) -> None:
        """pools: overrides of the environments' own settings. instances, memory (bytes): limits over all pools."""
        from agentfly.validation import PositiveInt, validate  # containers import this module without pydantic

        self.pools = dict(pools or {})
        for env_class, pool in self.pools.items():
            if not (inspect.isclass(env_class) and issubclass(env_class, Environment)) or not isinstance(pool, Pool):
                raise ConfigError(f"pools= maps environment classes to Pool(…), not {env_class!r} to {pool!r}")
        for name, value in (("instances", instances), ("memory", memory)):
            validate(name, value, PositiveInt | None, ", or None for no limit")
        self.budget = Budget(instances, memory)
        self._allocators: dict[asyncio.AbstractEventLoop, Allocator] = {}

    @property
    def num_instances(self) -> int:
        """Number of instances in any state, until they are closed."""
        return sum(pool.count for allocator in list(self._allocators.values()) for pool in allocator.pools.values())

    def pool_metrics(self) -> list[PoolMetrics]:
        """A snapshot of every pool."""
        allocators = list(self._allocators.values())
        return [pool.metrics() for allocator in allocators for pool in allocator.pools.values()]

    def metrics(self) -> dict[str, float]:
        """The pool metrics as flat numbers, such as `Counter/waiting`."""
        return {name: value for pool in self.pool_metrics() for name, value in pool.scalars.items()}

    def leases(
        self, task: Task, plan: Iterable[type[Environment]] = (), *, group: GroupLeases | None = None, chain: str = ""
    ) -> Leases:
        """The leases of one chain; use it as an async context manager.

        plan: the environments that the chain may need. All are acquired at once when the first is used.
        """
        return Leases(self._provider, task, plan, group=group, chain=chain)

    def group(self) -> GroupLeases:
        """The leases that the chains of one task share."""
        return GroupLeases(self._provider)

    async def warm_up(self, env_classes: Iterable[type[Environment]]) -> None:
        """Begin to start the `min_warm` instances of these environments, without waiting for them."""
        await self._allocator.warm_up(env_classes)

    async def close(self) -> None:
        """Close every instance of this event loop. The manager can be used again afterwards."""
        loop = asyncio.get_running_loop()
        if loop in self._allocators:
            await self._allocators[loop].close()
            self._allocators.pop(loop, None)

    @property
    def _provider(self) -> InstanceProvider:
        return self._allocator

    @property
    def _allocator(self) -> Allocator:
        loop = asyncio.get_running_loop()
        if loop not in self._allocators:
            # An allocator refers to its loop, so a weak mapping would never release either.
            for closed in [other for other in list(self._allocators) if other.is_closed()]:
                self._allocators.pop(closed, None)
            self._allocators[loop] = Allocator(self.budget, self._open_pool)
        return self._allocators[loop]

    def _open_pool(self, env_class: type[Environment]) -> PoolState:
        pool = self.pools.get(env_class, env_class.pool)
        if not isinstance(pool, Pool):
            settings = ", ".join(field.name for field in fields(Pool))
            raise ConfigError(f"{env_class.__name__}.pool is {pool!r}; write pool = Pool(…) with any of {settings}")
        return PoolState(env_class, pool, resolve_runtime(pool.runtime))


def resolve_runtime(runtime: Runtime | str) -> Runtime:
    """The runtime object for `Pool.runtime`, which is a name or the object itself."""
    names = ", ".join(RUNTIMES)
    if not isinstance(runtime, str):
        if not callable(getattr(runtime, "create", None)):
            raise ConfigError(f"{runtime!r} is not a runtime; use one of {names}, or an object such as Container(…)")
        return runtime
    if runtime not in RUNTIMES:
        raise ConfigError(f"there is no runtime {runtime!r}; use one of {names}, or an object such as Container(…)")
    module, _, name = RUNTIMES[runtime].partition(":")
    runtime_class: Any = getattr(importlib.import_module(module), name)
    created: Runtime = runtime_class()
    return created
