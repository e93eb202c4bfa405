"""The leases of one chain: every tool and reward of the chain gets the same instance until the chain has ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from agentfly.environment import Environment, Scope
from agentfly.errors import ConfigError, EnvironmentFault, ToolTimeout, describe
from agentfly.resources.metrics import Holder
from agentfly.resources.pool import Instance, PoolState, QueueTimeout
from agentfly.types import Task

E = TypeVar("E", bound=Environment)
T = TypeVar("T")
EnvClasses = Sequence[type[Environment]]
Held = dict[type[Environment], Instance]


class InstanceProvider(Protocol):
    """Where leases come from: the local allocator or a manager shared through Ray."""

    async def acquire(
        self, env_classes: EnvClasses, holder: Holder, order: int | None = None
    ) -> tuple[int, list[Instance]]:
        """Lease one healthy instance of each class, all at once.

        order: position in the queues of an earlier request of the same group. None takes the last position. Returns the
        position and the instances.
        """

    def release(self, instance: Instance, holder: Holder) -> None:
        """Release an instance for one holder."""

    def pool(self, env_class: type[Environment]) -> PoolState:
        """The pool of an environment, created on first use."""


class GroupLeases:
    """The instances that the chains of one task share in one run. Close it after the last chain has ended."""

    def __init__(self, provider: InstanceProvider) -> None:
        self._provider = provider
        self._held: Held = {}
        self._holder = Holder()
        self._order: int | None = None
        self._acquiring = False
        """Whether a chain is acquiring the group's instances."""
        self._users = 0
        self._changed = asyncio.Event()

    async def join(self, shared: EnvClasses, chain_only: EnvClasses, task: Task, holder: Holder) -> Held:
        """Acquire the group's instances and the chain's own. The first chain requests both at once.

        Later chains of the group take its position in the queues: while a group holds instances that others wait for,
        its chains go before those others. Instances that died are released when the last chain that uses them has
        ended. Until then a chain that needs new ones waits, and holds nothing.
        """
        # Wait until no other chain acquires the group's instances or uses dead ones.
        if self._held and (missing := [env_class.__name__ for env_class in shared if env_class not in self._held]):
            raise ConfigError(f"the chains of a group share the same environments; the first had no {missing[0]}")
        seconds = min(self._provider.pool(env_class).settings.wait_timeout for env_class in shared)
        try:
            async with asyncio.timeout(seconds):
                while self._acquiring or (self._users and self._has_dead_instance):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = " and ".join(env_class.__name__ for env_class in shared)
            reason = "another chain of its group still waits for it" if self._acquiring else "it died in use"
            users = f", and {self._users} chains of its group still have it" if self._users else ""
            raise QueueTimeout(f"no {names} was free within {seconds:g} s: {reason}{users}") from None
        if self._has_dead_instance:
            self.close()
        if not self._held:
            self._acquiring = True
            try:
                order, acquired = await _acquire_all(
                    self._provider, [*chain_only, *shared], task, holder=holder, order=None
                )
            finally:
                self._acquiring = False
                self._changed.set()
            # Stored when all are reset: after an error above, the next chain of the group tries again.
            self._held = {env_class: acquired.pop(env_class) for env_class in shared}
            self._holder = holder
            self._order = order
            self._users += 1
            return {**acquired, **self._held}
        held = {env_class: self._held[env_class] for env_class in shared}
        acquired = {}
        self._users += 1
        try:
            if chain_only:
                _, acquired = await _acquire_all(self._provider, chain_only, task, holder=holder, order=self._order)
        except BaseException:
            self.leave()
            raise
        return {**acquired, **held}

    @property
    def _has_dead_instance(self) -> bool:
        return any(instance.evict_reason for instance in self._held.values())

    def leave(self) -> None:
        """Count out a chain that has ended."""
        self._users -= 1
        self._changed.set()

    def close(self) -> None:
        """Release the group's instances."""
        held, self._held = self._held, {}
        self._order = None
        for instance in held.values():
            self._provider.release(instance, self._holder)


class Leases:
    """The leases of one chain. Use it as an async context manager."""

    __slots__ = ("_group", "_held", "_holder", "_joined", "_lock", "_plan", "_provider", "_task")

    def __init__(
        self,
        provider: InstanceProvider,
        task: Task,
        plan: Iterable[type[Environment]],
        group: GroupLeases | None,
        chain: str,
    ) -> None:
        self._provider = provider
        self._task = task
        self._group = group
        self._plan = tuple(dict.fromkeys(plan))
        self._holder = Holder(chain, task.id or f"{task.question[:40]!r}")
        self._held: Held = {}
        self._joined = False
        self._lock: asyncio.Lock | None = None
        """Created on first use: a chain without environments needs none."""

    async def get(self, env_class: type[E]) -> E:
        """The chain's instance of `env_class`. The first call acquires everything the chain may need, all at once."""
        if env_class in self._held:
            return cast("E", self._held[env_class].environment)
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if env_class not in self._held:
                # To acquire one more while holding others can deadlock: two chains may wait for what the other has.
                if self._plan and env_class not in self._plan:
                    planned = ", ".join(planned_class.__name__ for planned_class in self._plan)
                    raise ConfigError(
                        f"this chain has {planned}; {env_class.__name__} would have to be in the plan of its leases"
                    )
                if self._held:
                    raise ConfigError("name all environments a chain may need when its leases are made")
                plan = self._plan or (env_class,)
                shared = [
                    env_class for env_class in plan if self._provider.pool(env_class).settings.scope is Scope.GROUP
                ]
                if not shared:
                    _, self._held = await _acquire_all(
                        self._provider, plan, self._task, holder=self._holder, order=None
                    )
                elif self._group is not None:
                    chain_only = [env_class for env_class in plan if env_class not in shared]
                    self._held = await self._group.join(shared, chain_only, self._task, self._holder)
                    self._joined = True
                else:
                    raise ConfigError(f"{shared[0].__name__} is shared by a group, and this chain belongs to none")
        return cast("E", self._held[env_class].environment)

    async def act(
        self, env_classes: EnvClasses, action: Callable[[Mapping[type[Environment], Environment]], Awaitable[T]]
    ) -> T:
        """Run an action in the chain's instances; actions in a shared instance run one at a time unless `concurrent`.

        An instance is evicted after an action that raised an EnvironmentFault; unless its pool is `concurrent`, also
        after one that was cancelled or exceeded its time limit. A later action in it, as of a reward, has at most
        `reset_timeout` seconds: the instance may still be busy with the earlier one.
        """
        environments = {env_class: await self.get(env_class) for env_class in env_classes}
        instances = [self._held[env_class] for env_class in env_classes]
        async with contextlib.AsyncExitStack() as locks:
            for instance in sorted(instances, key=lambda instance: instance.number):  # one lock order for all chains
                settings = self._provider.pool(instance.env_class).settings
                if settings.scope is not Scope.CHAIN and not settings.concurrent:
                    await locks.enter_async_context(instance.lock)
            started_at = time.monotonic()
            evicted = any(instance.evict_reason for instance in instances)
            try:
                return await (
                    self._act_with_deadline(instances, action(environments)) if evicted else action(environments)
                )
            except (EnvironmentFault, asyncio.CancelledError) as error:
                # Other chains use a concurrent instance beside a slow call, and a new one may take minutes to start.
                slow = isinstance(error, ToolTimeout | asyncio.CancelledError)
                for instance in instances:
                    if not (slow and self._provider.pool(instance.env_class).settings.concurrent):
                        instance.evict_reason = instance.evict_reason or describe(error)
                raise
            finally:
                for instance in instances:
                    self._provider.pool(instance.env_class).step.add(time.monotonic() - started_at)

    async def _act_with_deadline(self, instances: Sequence[Instance], action: Awaitable[T]) -> T:
        names = " and ".join(instance.env_class.__name__ for instance in instances)
        limit = asyncio.timeout(min(self._provider.pool(i.env_class).settings.reset_timeout for i in instances))
        try:
            async with limit:
                return await action
        except TimeoutError:
            if not limit.expired():
                raise
            reason = next(instance.evict_reason for instance in instances if instance.evict_reason)
            raise EnvironmentFault(f"{names} does not answer any more since: {reason}") from None

    async def snapshot(self) -> dict[type[Environment], Any]:
        """The states of the chain's own instances, for `restore` in another chain of the task. Empty before the first
        use. An instance that all chains share has no state of a chain."""
        return {
            env_class: await instance.step("snapshot", self._provider.pool(env_class).settings.reset_timeout)
            for env_class, instance in self._held.items()
            if not self._provider.pool(env_class).is_shared
        }

    async def restore(self, states: Mapping[type[Environment], Any]) -> None:
        """Acquire the chain's instances and set them to these states."""
        for env_class, state in states.items():
            await self.get(env_class)
            instance = self._held[env_class]
            try:
                await instance.step("restore", self._provider.pool(env_class).settings.reset_timeout, state)
            except BaseException as error:
                # Half restored, it is in a state that belongs to no chain.
                instance.evict_reason = instance.evict_reason or describe(error)
                raise

    async def release(self) -> None:
        """Release all instances."""
        # Emptied first: a second release must not return an instance that another chain has by then.
        held, self._held = self._held, {}
        for env_class, instance in held.items():
            if self._provider.pool(env_class).settings.scope is not Scope.GROUP:
                self._provider.release(instance, self._holder)
        if self._joined and self._group is not None:
            self._joined = False
            self._group.leave()

    async def __aenter__(self) -> Leases:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


async def _acquire_all(
    provider: InstanceProvider, env_classes: EnvClasses, task: Task, *, holder: Holder, order: int | None
) -> tuple[int, Held]:
    """Acquire one instance of each class and reset it for the task. If a reset fails, all are released."""
    order, instances = await provider.acquire(env_classes, holder, order)
    try:
        for instance in instances:
            pool = provider.pool(instance.env_class)
            # Other chains are using it: a reset would take their state away.
            if pool.is_shared:
                continue
            started_at = time.monotonic()
            try:
                await instance.step("reset", pool.settings.reset_timeout, task)
            except BaseException as error:
                instance.evict_reason = describe(error)
                raise
            pool.reset.add(time.monotonic() - started_at)
    except BaseException:
        for instance in instances:
            provider.release(instance, holder)
        raise
    return order, dict(zip(env_classes, instances, strict=True))
