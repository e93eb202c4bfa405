"""Grants lease requests, and starts, checks, evicts and closes the instances of one event loop.

Deadlock is impossible because no chain waits while holding: a chain requests one instance of every environment it may
use and gets all of them in one step or none. Requests are granted in order: a request is granted when it is first in
the queue of each pool it names and each pool has an instance ready. The oldest request is therefore first in all its
queues, and what it waits for is leased to a chain that does not wait, is starting, or can be made room for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from agentfly.environment import Environment, Recycle
from agentfly.errors import EnvironmentFault, describe
from agentfly.resources.metrics import Holder
from agentfly.resources.pool import Budget, Instance, LeaseRequest, PoolState, priority

CHECK_AFTER = 5.0
"""Idle seconds after which an instance gets a health check before it is leased."""
PAUSE_AFTER = 2.0
"""Idle seconds after which an instance is paused."""
_LOG = logging.getLogger(__name__)


class Allocator:
    """All pools of one manager in one event loop."""

    def __init__(self, budget: Budget, open_pool: Callable[[type[Environment]], PoolState]) -> None:
        self._budget = budget
        self._open_pool = open_pool
        self.pools: dict[type[Environment], PoolState] = {}
        self._instances: set[Instance] = set()
        """All instances that were created and are not yet terminated."""
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: dict[Instance, asyncio.Task[None]] = {}
        self._idle_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._shutdown_hook: AsyncGenerator[None, None] | None = None

    async def start(self) -> None:
        """Register for closing at the shutdown of the event loop."""
        if self._shutdown_hook is None:

            async def close_on_shutdown() -> AsyncGenerator[None, None]:
                # asyncio closes open async generators when the loop shuts down.
                try:
                    yield
                finally:
                    await self._close()

            self._shutdown_hook = close_on_shutdown()
            await anext(self._shutdown_hook)

    def pool(self, env_class: type[Environment]) -> PoolState:
        if env_class not in self.pools:
            self.pools[env_class] = self._open_pool(env_class)
        return self.pools[env_class]

    async def warm_up(self, env_classes: Iterable[type[Environment]]) -> None:
        """Begin to start the `min_warm` instances of these environments, without waiting for them."""
        await self.start()
        self._start_missing(*map(self.pool, env_classes))

    # ── acquire ──

    async def acquire(
        self, env_classes: Sequence[type[Environment]], holder: Holder, order: int | None = None
    ) -> tuple[int, list[Instance]]:
        await self.start()
        pools = tuple([self.pool(env_class) for env_class in env_classes])
        if order is None:
            order = next(self._order)
        # A failed health check repeats the request under its old number: it keeps its position in the queues.
        while True:
            if self._closed:
                raise EnvironmentFault("this manager is closed")
            for pool in pools:  # during the cool-down, a queued request could not be granted
                if pool.start_failures.broken and time.monotonic() < pool.start_failures.retry_at:
                    raise pool.broken_error()
            self._budget.raise_if_never_fits(pools)
            requested_at = time.monotonic()
            if all(pool.ready() and (pool.is_shared or not pool.waiting) for pool in pools):
                instances = [pool.lease(holder) for pool in pools]  # it would be first in every queue
                self._start_missing(*pools)
            else:
                request = LeaseRequest(order, pools, holder)
                for pool in pools:
                    pool.waiting += 1
                    heapq.heappush(pool.queue, (request.order, request.number, request))
                self._grant(request)
                self._start_missing(*pools)
                seconds = min(pool.settings.wait_timeout for pool in pools)
                timer = asyncio.get_running_loop().call_later(seconds, self._expire, request, seconds)
                try:
                    instances = await request.future
                except asyncio.CancelledError:
                    if request.future.cancelled():
                        self._dequeue(request)
                    elif request.future.exception() is None:  # granted at the moment of the cancellation
                        for instance in request.future.result():
                            self.release(instance, holder)
                    raise
                finally:
                    timer.cancel()
            if await self._check_health(instances, holder):
                break
        waited = time.monotonic() - requested_at
        for pool in pools:
            pool.wait.add(waited)
        return order, instances

    def _expire(self, request: LeaseRequest, seconds: float) -> None:
        if request.pending:
            short = next((pool for pool in request.pools if not pool.ready()), request.pools[0])
            self._fail(request, short.timeout_error(request, seconds))

    def _fail(self, request: LeaseRequest, error: Exception) -> None:
        request.future.set_exception(error)
        self._dequeue(request)

    def _dequeue(self, request: LeaseRequest) -> None:
        for pool in request.pools:
            pool.waiting -= 1
        # A shared pool grants out of order: its other requests were not blocked by this one.
        self._serve(*(pool for pool in request.pools if not pool.is_shared))

    async def _check_health(self, instances: list[Instance], holder: Holder) -> bool:
        """Resume and check instances that were idle. If one fails it is evicted, and the others are released."""
        try:
            for instance in instances:
                timeout = self.pool(instance.env_class).settings.reset_timeout
                if instance.pausing is not None:
                    await instance.resume(timeout)
                if reason := instance.evict_reason or instance.handle.exit_reason():
                    raise EnvironmentFault(reason)
                if time.monotonic() - instance.idle_since > CHECK_AFTER and len(instance.holders) == 1:
                    await instance.step("check", timeout)
        except BaseException as error:
            instance.evict_reason = instance.evict_reason or describe(error)
            for leased in instances:
                self.release(leased, holder)
            if not isinstance(error, Exception):
                raise
            _LOG.warning("%r failed its health check after being idle: %s", instance, error)
            return False
        return True

    # ── grant and start ──

    def _serve(self, *pools: PoolState) -> None:
        """Grant the requests that these pools can serve, and start instances for the others."""
        if self._closed:
            return
        if any(pool.waiting for pool in pools):
            self._grant(*[request for pool in pools for request in pool.candidates()])
        self._start_missing(*pools)

    def _grant(self, *requests: LeaseRequest) -> None:
        """Grant those requests that are grantable, then the ones behind them."""
        # Every grant uncovers another request at the head of each of its pools' queues. Without looking at these too, a
        # request that waits in two pools would stay there although both have an idle instance.
        candidates = deque(requests)
        while candidates:
            request = candidates.popleft()
            if not request.grantable:
                continue
            request.future.set_result([pool.lease(request.holder) for pool in request.pools])
            for pool in request.pools:
                pool.waiting -= 1
                if pool.head is not None:
                    candidates.append(pool.head)

    def _start_missing(self, *pools: PoolState) -> None:
        """Start the missing instances of these pools; under a budget, of all pools, by priority, while they fit."""
        if self._closed:
            return
        if self._budget.has_no_limit:
            for pool in pools:
                for _ in range(pool.num_to_start()):
                    self._begin_start(pool)
            return
        while needy := [pool for pool in self.pools.values() if pool.num_to_start() > 0]:
            pool = min(needy, key=priority)
            if not self._budget.fits(pool, self.pools.values()):
                # Close one idle instance of another pool, unless one is being closed: its end comes back here. With one
                # per call, a burst of requests would close every warm instance for a single start.
                if not any(other.closing for other in self.pools.values()):
                    evictable = self._budget.find_evictable(pool, self.pools.values())
                    if evictable is not None:
                        self._close_instance(evictable, evictable.idle.popleft())
                return
            self._begin_start(pool)

    def _begin_start(self, pool: PoolState) -> None:
        pool.starting += 1
        self._spawn(self._start_instance(pool, time.monotonic()))

    async def _start_instance(self, pool: PoolState, started_at: float) -> None:
        """Create and start one instance. On failure terminate it and schedule the next attempt."""
        instance = None
        seconds = pool.settings.start_timeout
        try:
            async with asyncio.timeout(seconds) as limit:
                instance = Instance(pool.env_class, await pool.runtime.create(pool.env_class))
            self._instances.add(instance)
            await instance.step("start", seconds)
        except BaseException as error:
            # A start that is cancelled counts too: one that stays in `starting` takes a place of the pool for ever.
            if isinstance(error, TimeoutError) and instance is None and limit.expired():
                error = EnvironmentFault(f"the {pool.runtime.name} runtime created no {pool.name} within {seconds:g} s")
            pool.starting -= 1
            if instance is not None:
                instance.evict_reason = describe(error)
                self._close_instance(pool, instance)
            if not isinstance(error, Exception):
                raise
            if instance is None and not isinstance(error, EnvironmentFault):
                fault = EnvironmentFault(f"{pool.name}() failed: {describe(error)}")
                fault.__cause__ = error
                error = fault
            pool.record_start_failure(error, started_at)
            _LOG.warning("a start of %s failed: %s", pool.name, error)
            if pool.start_failures.broken:
                for request in [queued for *_, queued in pool.queue if queued.pending]:
                    self._fail(request, pool.broken_error())
            else:
                delay = max(pool.start_failures.retry_at - time.monotonic(), 0.0)
                asyncio.get_running_loop().call_later(delay, self._serve, pool)
        else:
            pool.starting -= 1
            pool.started += 1
            pool.start.add(time.monotonic() - started_at)
            # Only failures in a row break a pool: an environment that fails once an hour must not break it in a day.
            pool.start_failures.count = 0
            pool.start_failures.broken = False
            self._add_idle(pool, instance)
        self._serve(pool)

    # ── release ──

    def release(self, instance: Instance, holder: Holder) -> None:
        """Release an instance for one holder; the last holder's release ends the lease."""
        instance.holders.remove(holder)
        pool = self.pool(instance.env_class)
        if instance.number not in pool.leased:  # the manager was closed, which terminates it
            return
        if instance.holders:
            self._start_missing(pool)  # if it died, requests may wait for another
            return
        replace = self._budget.must_yield(pool, self.pools.values()) or pool.settings.recycle is Recycle.REPLACE
        del pool.leased[instance.number]
        if self._closed or replace or not pool.is_reusable(instance):
            self._close_instance(pool, instance)
        else:
            self._add_idle(pool, instance)
        self._serve(pool)

    def _add_idle(self, pool: PoolState, instance: Instance) -> None:
        instance.idle_since = time.monotonic()
        pool.idle.append(instance)
        if self._idle_timer is None and not self._closed:
            seconds = min(max(pool.settings.idle_seconds / 4, 0.01), PAUSE_AFTER)
            self._idle_timer = asyncio.get_running_loop().call_later(seconds, self._sweep_idle)

    def _sweep_idle(self) -> None:
        """Close idle instances that died or expired, pause the others, and start missing ones."""
        self._idle_timer = None
        now = time.monotonic()
        next_sweep = PAUSE_AFTER
        for pool in self.pools.values():
            for instance in list(pool.idle):
                idle = now - instance.idle_since
                instance.evict_reason = instance.evict_reason or instance.handle.exit_reason() or ""
                spare = len(pool.idle) > pool.settings.min_warm and pool.head is None
                if instance.evict_reason or (spare and idle >= pool.settings.idle_seconds):
                    pool.idle.remove(instance)
                    self._close_instance(pool, instance)
                elif idle >= PAUSE_AFTER and instance.pausing is None:
                    instance.pausing = self._spawn(instance.pause(pool.settings.reset_timeout))
            if pool.idle:
                next_sweep = min(next_sweep, max(pool.settings.idle_seconds / 4, 0.01))
        self._start_missing(*self.pools.values())
        if not self._closed and any(pool.idle for pool in self.pools.values()):
            self._idle_timer = asyncio.get_running_loop().call_later(next_sweep, self._sweep_idle)

    # ── close ──

    def _close_instance(self, pool: PoolState, instance: Instance) -> None:
        pool.closing += 1
        pool.evicted += bool(instance.evict_reason)
        self._closing[instance] = self._spawn(self._terminate(pool, instance))

    async def _terminate(self, pool: PoolState, instance: Instance) -> None:
        """Close an instance unless it is dead, then have its runtime terminate what is left."""
        try:
            if instance.handle.exit_reason() is None:
                await instance.step("close", pool.settings.reset_timeout)
        except EnvironmentFault as fault:
            pool.failed_closes += 1
            _LOG.warning("%r: %s", instance, fault)
        try:
            async with asyncio.timeout(pool.settings.reset_timeout):
                await instance.handle.terminate()
        except Exception as error:
            pool.failed_closes += 1
            _LOG.error("%r could not be terminated: %s", instance, describe(error))
        self._closing.pop(instance, None)
        self._instances.discard(instance)
        pool.closing -= 1
        self._serve(pool)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Terminate every instance, leased ones too, and fail all waiting requests."""
        if self._shutdown_hook is not None:
            await self._close()  # if this is cancelled, the shutdown of the loop completes it
            await self._shutdown_hook.aclose()

    async def _close(self) -> None:
        self._closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for pool in self.pools.values():
            for request in [queued for *_, queued in pool.queue if queued.pending]:
                self._fail(request, EnvironmentFault("this manager is closed"))
        for task in self._tasks - set(self._closing.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self.pools.values():
            pool.starting = 0  # a start that was cancelled before its first step has not decremented it
        for instance in self._instances:
            pool = self.pool(instance.env_class)
            closing = self._closing.get(instance)
            if closing is None:
                pool.leased.pop(instance.number, None)
                if instance in pool.idle:
                    pool.idle.remove(instance)
                self._close_instance(pool, instance)
            elif closing.done():  # cancelled by the loop's shutdown before it finished
                self._closing[instance] = self._spawn(self._terminate(pool, instance))
        await asyncio.gather(*self._tasks, return_exceptions=True)
