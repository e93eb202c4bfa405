"""The actor of a shared manager. It leases instance actors to clients and releases the leases of clients that died.

It never loads a user's class: it forwards the pickled class of a client, and calls `start`, `check` and `close` by
name. Chains call their instances directly. Only acquire and release go through this actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from agentfly.environment import Environment, Pool
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.allocator import Allocator
from agentfly.resources.metrics import Holder, PoolMetrics
from agentfly.resources.pool import Budget, Instance, PoolState
from agentfly.resources.runtimes.ray.runtime import (
    PICKLED_CLASS,
    ActorHandle,
    ActorUnreachable,
    RayRuntime,
    await_answer,
    call_actor,
    import_ray,
    kill,
)

LINGER = 2.0
"""Seconds that a manager without clients waits for one before it ends itself."""


@dataclass(frozen=True, slots=True)
class SerializedClass:
    """An environment class as a client sends it."""

    name: str
    """Module and qualified name: the same in every process."""
    source: str
    """Digest of the source. Empty if the source cannot be read."""
    pool: Pool
    pickled: bytes


class Grant(NamedTuple):
    """A leased instance, as sent to the client."""

    number: int
    actor: Any
    description: str


class ClientLease(NamedTuple):
    """A leased instance, as recorded by the manager."""

    request: int
    instance: Instance
    holder: Holder


@dataclass
class ManagerClient:
    """One client process."""

    watch: asyncio.Task[None]
    leases: list[ClientLease] = field(default_factory=list)
    pending: dict[int, asyncio.Task[tuple[int, list[Grant]]]] = field(default_factory=dict)
    """Requests that wait for instances."""
    withdrawn: set[int] = field(default_factory=set)
    """Requests that were withdrawn before they arrived: Ray does not guarantee an order."""


class ManagerActor:
    """The shared manager. All methods run in one event loop."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._allocator = Allocator(budget, self._open_pool)
        self._classes: dict[str, type[Any]] = {}
        """Placeholder classes by name, each with its SerializedClass as `serialized`."""
        self._clients: dict[str, ManagerClient] = {}
        self._reset()

    # ── clients ──

    async def join(self, client: str, heartbeat: Any, budget: Budget) -> None:
        """Add a client. Limits that it sets must equal those of the manager."""
        for name in ("instances", "memory"):
            requested, existing = getattr(budget, name), getattr(self._budget, name)
            if requested is not None and requested != existing:
                raise ConfigError(f"{name}={requested} is asked of a manager that was made with {name}={existing}")
        self._clients[client] = ManagerClient(asyncio.create_task(self._watch(client, heartbeat)))

    async def _watch(self, client: str, heartbeat: Any) -> None:
        """Remove a client when its heartbeat actor dies."""
        while client in self._clients:
            try:
                await await_answer(call_actor(heartbeat, "stay"))
            except ActorUnreachable as error:
                if error.dead:
                    self._remove(client, f"its chain's process died: {error}")
                else:  # out of reach, temporarily or for good: Ray will decide
                    await asyncio.sleep(1)

    async def leave(self, client: str) -> None:
        """Remove a client. After the last one, wait until all instances are closed."""
        if client in self._clients:
            self._clients[client].watch.cancel()
            self._remove(client, "its chain's process closed its manager")
        if not self._clients:
            await asyncio.shield(self._closing)

    def _remove(self, client: str, reason: str) -> None:
        removed = self._clients.pop(client)
        for pending in removed.pending.values():
            pending.cancel()
        for lease in removed.leases:
            self._release(lease, reason)
        if not self._clients:
            self._reset()

    def _reset(self) -> None:
        """Close all instances, start over with an empty allocator, and end this actor if no client joins."""
        allocator, self._allocator = self._allocator, Allocator(self._budget, self._open_pool)
        self._classes = {}
        self._closing = asyncio.create_task(allocator.close())
        self._lingering = asyncio.create_task(self._linger(self._closing))

    async def _linger(self, closing: asyncio.Task[None]) -> None:
        await closing
        await asyncio.sleep(LINGER)
        if not self._clients:
            kill(import_ray().get_runtime_context().current_actor)

    # ── environments ──

    async def register(self, client: str, serialized: SerializedClass) -> None:
        """Add a class. Its source and pool must be the same for every client."""
        if serialized.name not in self._classes:
            attributes = {"serialized": serialized, PICKLED_CLASS: serialized.pickled}
            self._classes[serialized.name] = type(serialized.name.rpartition(".")[2], (Environment,), attributes)
        existing: SerializedClass = self._classes[serialized.name].serialized
        for what in ("source", "pool"):
            if getattr(existing, what) != getattr(serialized, what):
                raise ConfigError(
                    f"{serialized.name} has another {what} here than in the process that used it first"
                    f"{'' if what == 'source' else f': {serialized.pool}, not {existing.pool}'}; processes that share "
                    "a manager must run the same code"
                )

    def _env_class(self, name: str) -> type[Environment]:
        if name not in self._classes:
            raise EnvironmentFault(f"the manager was restarted and does not know {name}")
        return self._classes[name]

    def _open_pool(self, env_class: type[Environment]) -> PoolState:
        pool: Pool = vars(env_class)["serialized"].pool
        return PoolState(env_class, pool, cast("RayRuntime", pool.runtime))

    async def warm_up(self, client: str, names: Sequence[str]) -> None:
        await self._allocator.warm_up([self._env_class(name) for name in names])

    async def pool_metrics(self, client: str) -> dict[str, PoolMetrics]:
        """A snapshot of every pool, by the name of its class."""
        pools = self._allocator.pools.items()
        return {vars(env_class)["serialized"].name: pool.metrics() for env_class, pool in pools}

    # ── leases ──

    async def acquire(
        self, client: str, request: int, names: Sequence[str], holder: Holder, order: int | None
    ) -> tuple[int, list[Grant]]:
        lessee = self._clients.get(client)
        if lessee is None:
            raise EnvironmentFault("this process has left the manager")
        env_classes = [self._env_class(name) for name in names]

        async def lease() -> tuple[int, list[Grant]]:
            # Acquires and records without an await in between: a cancellation cannot lose a granted lease.
            position, instances = await self._allocator.acquire(env_classes, holder, order)
            lessee.leases += [ClientLease(request, instance, holder) for instance in instances]
            handles = [(instance.number, cast("ActorHandle", instance.handle)) for instance in instances]
            return position, [Grant(number, handle.actor, handle.description) for number, handle in handles]

        task = lessee.pending[request] = asyncio.create_task(lease())
        if request in lessee.withdrawn:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            raise EnvironmentFault("the request was withdrawn") from None
        finally:
            del lessee.pending[request]
            lessee.withdrawn.discard(request)

    async def withdraw(self, client: str, request: int) -> None:
        """Cancel a request. Instances that it was granted are released unused."""
        lessee = self._clients.get(client)
        if lessee is None:
            return
        granted = [lease for lease in lessee.leases if lease.request == request]
        for lease in granted:
            lessee.leases.remove(lease)
            self._release(lease, "")
        if request in lessee.pending:
            lessee.pending[request].cancel()
        elif not granted:
            lessee.withdrawn.add(request)

    async def release(self, client: str, number: int, holder: Holder, evict_reason: str) -> None:
        lessee = self._clients.get(client)
        leases = lessee.leases if lessee is not None else []
        for lease in leases:
            if lease.instance.number == number and lease.holder == holder:
                leases.remove(lease)
                self._release(lease, evict_reason)
                return

    def _release(self, lease: ClientLease, evict_reason: str) -> None:
        lease.instance.evict_reason = lease.instance.evict_reason or evict_reason
        self._allocator.release(lease.instance, lease.holder)
