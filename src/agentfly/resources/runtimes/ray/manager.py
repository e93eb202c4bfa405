"""`RayManager("shared")`: one manager for the chains of many processes on many nodes.

    process ──► ManagerActor: acquire, release; grants handles of instance actors
       └──────► InstanceActor: reset, tool calls, …   directly, not through the manager

The first process that uses the name creates the manager actor. It ends, with all instances, after the last process has
closed its manager or died. The leases of a process that dies are released.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import itertools
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from agentfly.environment import Environment, InstanceHandle, Pool
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.lease import InstanceProvider
from agentfly.resources.manager import InProcess, ResourceManager
from agentfly.resources.metrics import Holder, PoolMetrics
from agentfly.resources.pool import Instance, PoolState
from agentfly.resources.rpc.proxy import attach_proxy
from agentfly.resources.rpc.serialization import dumps, modules_by_value
from agentfly.resources.runtimes.ray.manager_actor import ManagerActor, SerializedClass
from agentfly.resources.runtimes.ray.runtime import (
    MAX_CONCURRENCY,
    NAMESPACE,
    ActorTransport,
    ActorUnreachable,
    Heartbeat,
    RayRuntime,
    await_answer,
    call_actor,
    connect,
    get_answer,
    kill,
)
from agentfly.threads import call

_JOIN_SECONDS = 60.0
"""Timeout for joining the manager actor."""
_METRICS_SECONDS = 10.0
"""Timeout for reading its pool metrics."""
_JOIN_ATTEMPTS = 3


class RayManager(ResourceManager):
    """This process's client of a manager that other processes share."""

    def __init__(
        self,
        name: str = "shared",
        pools: Mapping[type[Environment], Pool] | None = None,
        *,
        instances: int | None = None,
        memory: int | None = None,
    ) -> None:
        """Connect on first use.

        name: processes that use the same name in the same cluster share the instances.
        instances, memory: limits as for any manager. The first process sets them. Others pass the same or None.
        """
        super().__init__(pools, instances=instances, memory=memory)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a RayManager is known by a name, such as 'shared', not by {name!r}")
        self.name = name
        self._client_id = uuid.uuid4().hex
        self._requests = itertools.count(1)
        self._actor: Any = None
        """The manager actor. None while this process has not joined."""
        self._heartbeat: Any = None
        self._join_lock = threading.Lock()
        self._pool_states: dict[type[Environment], PoolState] = {}
        self._registered: set[type[Environment]] = set()
        """Classes that the manager actor knows."""

    def __reduce__(self) -> tuple[Any, ...]:
        budget = {"instances": self.budget.instances, "memory": self.budget.memory}
        return functools.partial(RayManager, self.name, self.pools, **budget), ()

    @property
    def num_instances(self) -> int:
        """Number of instances in any state, leased by any process."""
        return sum(pool.starting + pool.warm + pool.leased + pool.closing for pool in self.pool_metrics())

    def pool_metrics(self) -> list[PoolMetrics]:
        """A snapshot of every pool of the shared manager, with this process's own `reset` and `step` times."""
        actor = self._actor
        if actor is None:
            return []
        try:
            pools = get_answer(call_actor(actor, "pool_metrics", self._client_id), _METRICS_SECONDS)
        except ActorUnreachable as error:
            raise self._handle_unreachable(actor, error) from error
        for env_class, pool in self._pool_states.items():
            if (name := _qualified_name(env_class)) in pools:
                timings = {"reset": pool.reset.summary, "step": pool.step.summary}
                pools[name] = replace(pools[name], seconds={**pools[name].seconds, **timings})
        return list(pools.values())

    async def warm_up(self, env_classes: Iterable[type[Environment]]) -> None:
        names = [await self._register(env_class) for env_class in env_classes]
        await self._ask(await self._connect(), "warm_up", names)

    async def close(self) -> None:
        """Leave. This process's leases end; the last process to leave ends all instances."""
        actor, self._actor = self._actor, None
        heartbeat = self._heartbeat
        self._registered.clear()
        if actor is None:
            return
        try:
            with contextlib.suppress(ActorUnreachable):  # a dead actor has nothing left to close
                await await_answer(call_actor(actor, "leave", self._client_id))
        finally:
            kill(heartbeat)

    # ── leases ──

    @property
    def _provider(self) -> InstanceProvider:
        return self

    def pool(self, env_class: type[Environment]) -> PoolState:
        """The settings of a pool and this process's own timings. The instances belong to the manager actor."""
        if env_class not in self._pool_states:
            self._pool_states[env_class] = self._open_pool(env_class)
        return self._pool_states[env_class]

    def _open_pool(self, env_class: type[Environment]) -> PoolState:
        pool = super()._open_pool(env_class)
        runtime = RayRuntime() if isinstance(pool.runtime, InProcess) else pool.runtime
        if not isinstance(runtime, RayRuntime):
            raise ConfigError(
                f"{env_class.__name__} has the runtime {runtime.name!r}; a RayManager leases Ray actors only: write "
                "runtime=RayRuntime(…), or nothing"
            )
        if pool.is_shared and not pool.settings.concurrent:
            raise ConfigError(
                f"{env_class.__name__} is shared by all chains, and chains of several processes cannot take turns in "
                "it; write concurrent=True if it supports concurrent actions, or scope='group'"
            )
        return PoolState(env_class, replace(pool.settings, runtime=runtime), runtime)

    async def acquire(
        self, env_classes: Sequence[type[Environment]], holder: Holder, order: int | None = None
    ) -> tuple[int, list[Instance]]:
        names = [await self._register(env_class) for env_class in env_classes]
        request = next(self._requests)
        actor = await self._connect()
        granted = False
        try:
            order, grants = await self._ask(actor, "acquire", request, names, holder, order)
            granted = True
            instances = []
            for env_class, grant in zip(env_classes, grants, strict=True):
                transport = ActorTransport(grant.actor, grant.description)
                environment, remote = attach_proxy(env_class, transport, everything=True)
                if self.pool(env_class).is_shared:  # never reset: any request fills the mirrored attributes
                    await remote.ask("get", "__doc__", (), {})
                instance = Instance(env_class, _LeasedHandle(environment, actor))
                instance.number = grant.number
                instances.append(instance)
        except BaseException as error:
            if granted or isinstance(error, asyncio.CancelledError):
                _notify(actor, "withdraw", self._client_id, request)
            raise
        return order, instances

    def release(self, instance: Instance, holder: Holder) -> None:
        actor = cast("_LeasedHandle", instance.handle).manager_actor
        _notify(actor, "release", self._client_id, instance.number, holder, instance.evict_reason)

    # ── connection to the manager actor ──

    async def _register(self, env_class: type[Environment]) -> str:
        """Send a class to the manager actor unless it knows it; the name it is known by."""
        name = _qualified_name(env_class)
        if env_class not in self._registered:
            pickled = dumps(env_class, modules_by_value(env_class, everything=True), env_class.__name__)
            try:
                source = hashlib.sha256(inspect.getsource(env_class).encode()).hexdigest()
            except (OSError, TypeError):
                source = ""
            serialized = SerializedClass(name, source, self.pool(env_class).settings, pickled=pickled)
            await self._ask(await self._connect(), "register", serialized)
            self._registered.add(env_class)
        return name

    async def _ask(self, actor: Any, method: str, *args: Any) -> Any:
        try:
            return await await_answer(call_actor(actor, method, self._client_id, *args))
        except ActorUnreachable as error:
            raise self._handle_unreachable(actor, error) from error

    async def _connect(self) -> Any:
        return self._actor or await call(self._join)

    def _join(self) -> Any:
        """Join the manager actor, creating it if necessary. Blocks."""
        ray = connect()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._join_lock:
            if self._actor is not None:
                return self._actor
            node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            local = {"num_cpus": 0, "scheduling_strategy": node}
            named = {"name": self.name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
            options = {"max_concurrency": MAX_CONCURRENCY, **local, **named}
            # An actor without clients may end itself at the moment of joining.
            attempts = Retrying(
                retry=retry_if_exception_type(ActorUnreachable), stop=stop_after_attempt(_JOIN_ATTEMPTS), reraise=True
            )
            try:
                for attempt in attempts:
                    with attempt:
                        actor = ray.remote(ManagerActor).options(**options).remote(self.budget)
                        heartbeat = ray.remote(Heartbeat).options(**local).remote()
                        get_answer(call_actor(actor, "join", self._client_id, heartbeat, self.budget), _JOIN_SECONDS)
            except ActorUnreachable as error:
                raise self._handle_unreachable(None, error) from error
            self._actor = actor
            self._heartbeat = heartbeat
            weakref.finalize(self, kill, heartbeat)  # a Ray worker outlives the task that dropped its manager
            return self._actor

    def _handle_unreachable(self, actor: Any, error: ActorUnreachable) -> EnvironmentFault:
        """The fault to raise. If the actor is dead, the next request joins or creates another."""
        if error.dead and actor is self._actor:
            self._actor = None
            self._registered.clear()
        return EnvironmentFault(f"the manager {self.name!r} cannot be reached: {error}")


class _LeasedHandle(InstanceHandle):
    """A leased instance, with the manager actor to release it to: this process may have joined another since."""

    def __init__(self, environment: Environment, manager_actor: Any) -> None:
        super().__init__(environment)
        self.manager_actor = manager_actor


def _notify(actor: Any, method: str, *args: Any) -> None:
    """Call a method without waiting for the result; an actor that is gone is ignored."""
    with contextlib.suppress(ActorUnreachable):
        call_actor(actor, method, *args)


def _qualified_name(env_class: type[Environment]) -> str:
    return f"{env_class.__module__}.{env_class.__qualname__}"
