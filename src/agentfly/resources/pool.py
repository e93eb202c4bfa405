"""The pool of one environment class: idle, leased and starting instances, and the queue of waiting requests.

`Budget` limits all pools of a manager together. The next instance goes to the pool that has waiting requests and the
fewest instances, so that no pool starves. Ties go to the longest waiting request. An instance that an older request
waits for is never evicted in favor of a newer one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from agentfly.environment import Environment, InstanceHandle, Pool, Runtime, Scope
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.resources.metrics import Histogram, Holder, LeaseInfo, PoolMetrics
from agentfly.threads import LoopTimer, call, run_within

MAX_START_ATTEMPTS = 3
"""Consecutive failed starts, with no live instance, after which the waiting requests fail."""
BACKOFF = 0.2
"""Seconds between the first failed start and the next attempt, doubled after every further failure."""
MAX_BACKOFF = 30.0
COOL_DOWN = 30.0
"""Seconds without a start after the last of these attempts."""
MAX_CONCURRENT_STARTS = 64
_instance_numbers = itertools.count(1)
_request_numbers = itertools.count()


class QueueTimeout(EnvironmentFault):
    """No instance was free within `wait_timeout`. The message has the queue length and the current lease holders."""


class Instance:
    """An environment instance from creation to termination, with its runtime handle and its lease holders."""

    __slots__ = (
        "_lock", "env_class", "evict_reason", "handle", "holders", "idle_since", "leased_at", "number", "pausing",
        "uses",
    )  # fmt: skip

    def __init__(self, env_class: type[Environment], handle: InstanceHandle) -> None:
        self.env_class = env_class
        self.handle = handle
        self.number = next(_instance_numbers)
        self.uses = 0
        self.holders: list[Holder] = []
        """Current lease holders; more than one only for a shared instance."""
        self.idle_since = self.leased_at = time.monotonic()
        self.evict_reason = ""
        """Why it must not be leased again. Empty while it may be."""
        self.pausing: asyncio.Task[None] | None = None
        """The task that paused it. None while it is running."""
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
        """Call a method such as `reset` with a timeout in seconds. Every failure is an EnvironmentFault.

        `pause` and `resume` are methods of the handle, the others of the environment.
        """
        # `expired` tells the limit from a TimeoutError that the environment itself raises.
        limit = asyncio.timeout(timeout)
        try:
            owner = self.handle if method in ("pause", "resume") else self.handle.environment
            step = call(getattr(owner, method), *args)
            return await run_within(limit, LoopTimer(step, f"{self.env_class.__name__}.{method}"))
        except EnvironmentFault:
            raise
        except Exception as error:
            reason = f"took longer than {timeout:g} s" if limit.expired() else f"failed: {describe(error)}"
            raise EnvironmentFault(f"{self.env_class.__name__}.{method} {reason}") from error

    async def pause(self, timeout: float) -> None:
        """Pause it. If that fails it is not leased again."""
        try:
            await self.step("pause", timeout)
        except EnvironmentFault as fault:
            self.evict_reason = str(fault)

    async def resume(self, timeout: float) -> None:
        """Resume it. If several chains lease it at once, one resumes it and the others wait."""
        async with self.lock:
            # A pause that still runs is awaited: resumed before it, the instance would freeze during the chain's call.
            if self.pausing is not None and not self.evict_reason:
                await self.pausing
                await self.step("resume", timeout)
                self.pausing = None


class LeaseRequest:
    """A chain's request for one instance from each of several pools, granted all at once."""

    __slots__ = ("future", "holder", "number", "order", "pools")

    def __init__(self, order: int, pools: tuple[PoolState, ...], holder: Holder) -> None:
        self.order = order
        self.pools = pools
        self.holder = holder
        self.number = next(_request_numbers)
        """Decides between the chains of a group, which share `order`: otherwise two of them could each be first in one
        queue, and neither first in both."""
        self.future: asyncio.Future[list[Instance]] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: LeaseRequest) -> bool:
        return (self.order, self.number) < (other.order, other.number)

    @property
    def pending(self) -> bool:
        return not self.future.done()

    @property
    def grantable(self) -> bool:
        """Whether it is first in every queue and every pool has an instance ready."""
        ready = (pool.ready() and (pool.is_shared or pool.head is self) for pool in self.pools)
        return not self.future.done() and all(ready)


@dataclass(slots=True)
class StartFailures:
    """Consecutive failed starts of a pool."""

    count: int = 0
    last: float = 0.0
    """Time of the last failure. Starts that began before it count as the same failure."""
    retry_at: float = 0.0
    """No start before this time."""
    reason: str = ""
    """The last error."""
    broken: bool = False
    """Whether requests fail immediately instead of waiting for an instance."""
    misconfigured: bool = False
    """Whether the last error was a ConfigError."""


@dataclass(eq=False)
class PoolState:
    """State of one pool. It keeps counts and order; the allocator decides and acts."""

    env_class: type[Environment]
    settings: Pool
    runtime: Runtime
    idle: deque[Instance] = field(default_factory=deque)
    """Started and not leased. The most recently used one is leased first."""
    leased: dict[int, Instance] = field(default_factory=dict)
    starting: int = 0
    closing: int = 0
    queue: list[tuple[int, int, LeaseRequest]] = field(default_factory=list)
    """Heap of requests with their order and number. Those that were granted or withdrawn are removed lazily."""
    waiting: int = 0
    start_failures: StartFailures = field(default_factory=StartFailures)
    started: int = 0
    total_leases: int = 0
    evicted: int = 0
    failed_starts: int = 0
    failed_closes: int = 0
    timeouts: int = 0
    wait: Histogram = field(default_factory=Histogram)
    start: Histogram = field(default_factory=Histogram)
    reset: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)
    is_shared: bool = field(init=False)
    """Whether all chains share one instance."""

    def __post_init__(self) -> None:
        self.is_shared = self.settings.scope is Scope.GLOBAL

    @property
    def name(self) -> str:
        return self.env_class.__name__

    @property
    def count(self) -> int:
        """Number of instances in any state."""
        return len(self.idle) + len(self.leased) + self.starting + self.closing

    @property
    def memory_per_instance(self) -> int:
        """Declared bytes per instance. 0 if none are declared."""
        return self.settings.memory or 0

    @property
    def max_instances(self) -> int | None:
        """Maximum number of instances. None: no limit."""
        if self.is_shared:
            return 1 + sum(bool(instance.evict_reason) for instance in self.leased.values())
        return self.runtime.max_instances if self.settings.max_instances is None else self.settings.max_instances

    @property
    def head(self) -> LeaseRequest | None:
        """The oldest waiting request. None if the queue is empty."""
        queue = self.queue
        # Cancelled requests go when they reach the top: to search the heap for each would take time linear in the
        # queue.
        while queue and queue[0][2].future.done():
            heapq.heappop(queue)
        return queue[0][2] if queue else None

    def candidates(self) -> list[LeaseRequest]:
        """The requests that may be granted next: the first in the queue, or all of them for a shared instance."""
        if not self.is_shared:
            head = self.head
            return [] if head is None else [head]
        return [request for *_, request in sorted(self.queue) if request.pending] if self.ready() else []

    def _shared_instance(self) -> Instance | None:
        """The leased instance that further chains may lease as well. None if there is none, or it is not shared."""
        if not self.is_shared:
            return None
        return next((instance for instance in self.leased.values() if not instance.evict_reason), None)

    def ready(self) -> bool:
        """Whether an instance can be leased immediately."""
        return bool(self.idle) or (self.is_shared and self._shared_instance() is not None)

    def lease(self, holder: Holder) -> Instance:
        """Lease an instance to a holder; requires `ready()`."""
        instance = self._shared_instance()
        if instance is None:
            # The last one used. What another pool's start evicts is taken from the other end.
            instance = self.idle.pop()
            instance.leased_at = time.monotonic()
            self.leased[instance.number] = instance
        instance.holders.append(holder)
        instance.uses += 1
        self.total_leases += 1
        return instance

    def num_to_start(self) -> int:
        """Number of instances to start under this pool's own limits; may be negative."""
        needed = self.waiting
        if needed and self.is_shared:
            needed = 0 if self._shared_instance() else 1
        missing = needed + self.settings.min_warm - len(self.idle) - self.starting
        # Without the pause, a class whose start fails at once would be started in a loop that takes the whole CPU.
        if missing <= 0 or self.start_failures.retry_at > time.monotonic():
            return 0
        room = missing if self.max_instances is None else self.max_instances - self.count
        return min(missing, room, MAX_CONCURRENT_STARTS - self.starting)

    def is_reusable(self, instance: Instance) -> bool:
        """Whether a released instance may be leased again."""
        instance.evict_reason = instance.evict_reason or instance.handle.exit_reason() or ""
        worn_out = self.settings.max_uses is not None and instance.uses >= self.settings.max_uses
        return not instance.evict_reason and not worn_out

    def record_start_failure(self, error: BaseException, started_at: float) -> None:
        """Count a failed start that began at `started_at`, and set the time of the next attempt."""
        self.failed_starts += 1
        failures = self.start_failures
        now = time.monotonic()
        if started_at < failures.last:
            return
        failures.count += 1
        failures.last = now
        failures.reason = str(error)
        failures.misconfigured = isinstance(error.__cause__ or error, ConfigError)
        final = failures.count >= MAX_START_ATTEMPTS or failures.misconfigured
        # While an instance lives, requests can still be served, only later.
        failures.broken = final and not self.idle and not self.leased
        backoff = min(BACKOFF * 2 ** (failures.count - 1), MAX_BACKOFF)
        failures.retry_at = now + (COOL_DOWN if failures.broken else backoff)

    def broken_error(self) -> EnvironmentFault:
        """The error for requests of a pool whose instances cannot be started."""
        count = self.start_failures.count
        attempts = f"{count} starts failed, the last with: " if count > 1 else ""
        return EnvironmentFault(f"no {self.name} can be started: {attempts}{self.start_failures.reason}")

    def timeout_error(self, request: LeaseRequest, seconds: float) -> QueueTimeout:
        """Count a request that waited too long; the error for it."""
        self.timeouts += 1
        limit = "" if self.max_instances is None else f" of at most {self.max_instances}"
        holders = "; ".join(str(instance.lease_info) for instance in list(self.leased.values())[:8]) or "no chain"
        omitted = f"; and {len(self.leased) - 8} more" if len(self.leased) > 8 else ""
        starting = "" if self.idle else f", {self.starting} starting"
        blocking = next((pool for pool in request.pools if pool is not self and not pool.ready()), None)
        also = f" No {blocking.name} was ready either." if blocking else ""
        return QueueTimeout(
            f"no {self.name} was free within {seconds:g} s: {self.waiting} chains were waiting{starting}, "
            f"{len(self.leased)}{limit} are leased: to {holders}{omitted}.{also} Raise max_instances or wait_timeout, "
            "or run fewer chains at once."
        )

    def metrics(self) -> PoolMetrics:
        """A snapshot of the pool: counts under the same names, and what is derived."""
        alive = [*self.idle, *self.leased.values()]
        sizes = [size for instance in alive if (size := instance.handle.memory()) is not None]
        same = {field.name: getattr(self, field.name) for field in fields(PoolMetrics) if hasattr(self, field.name)}
        derived = {
            "environment": self.name,
            "runtime": self.runtime.name,
            "warm": len(self.idle),
            "leased": len(self.leased),
            "memory": sum(sizes) if sizes else None,
            "broken": str(self.broken_error()) if self.start_failures.broken else "",
            "misconfigured": self.start_failures.broken and self.start_failures.misconfigured,
            "leases": tuple(instance.lease_info for instance in self.leased.values()),
            "seconds": {name: getattr(self, name).summary for name in ("wait", "start", "reset", "step")},
        }
        return PoolMetrics(**{**same, **derived})


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits over all pools together."""

    instances: int | None = None
    """Maximum number of instances. None: no limit."""
    memory: int | None = None
    """Bytes, as declared by `Pool.memory` for each instance. None: no limit."""

    @property
    def has_no_limit(self) -> bool:
        return self.instances is None and self.memory is None

    def raise_if_never_fits(self, pools: Iterable[PoolState]) -> None:
        """Raise ConfigError if one instance of each of these pools exceeds the budget."""
        if self.has_no_limit:
            return
        requested = list(pools)
        names = " and ".join(pool.name for pool in requested)
        memory = sum(pool.memory_per_instance for pool in requested)
        if self.instances is not None and len(requested) > self.instances:
            raise ConfigError(f"a chain needs {names}; a budget of {self.instances} instances has no room")
        if self.memory is not None and memory > self.memory:
            raise ConfigError(f"{names} need {memory} bytes; a budget of {self.memory} bytes has no room")

    def fits(self, pool: PoolState, pools: Iterable[PoolState]) -> bool:
        """Whether one more instance of `pool` fits beside all instances of `pools`."""
        existing = list(pools)
        if self.instances is not None and sum(other.count for other in existing) >= self.instances:
            return False
        used = sum(other.count * other.memory_per_instance for other in existing)
        return self.memory is None or used + pool.memory_per_instance <= self.memory

    def find_evictable(self, pool: PoolState, pools: Iterable[PoolState]) -> PoolState | None:
        """Another pool with an idle instance that may be closed to make room for `pool`. None if there is none."""
        request = pool.head
        if request is None:
            return None
        for other in pools:
            # one idle instance is reserved for an older request
            reserved = other.head is not None and not request < other.head
            if other is not pool and len(other.idle) > reserved:
                return other
        return None

    def must_yield(self, pool: PoolState, pools: Iterable[PoolState]) -> bool:
        """Whether an instance that was released must be closed to make room for a pool below its fair share."""
        if self.has_no_limit:
            return False
        request = pool.head
        existing = list(pools)
        for other in existing:
            waiting = other.head
            if other is pool or waiting is None or other.num_to_start() <= 0 or self.fits(other, existing):
                continue
            # A difference of 1 is fair: closing here and starting there would only swap the counts, over and over.
            if request is None or pool.count - other.count >= 2 or (other.count == 0 and waiting < request):
                return True
        return False


def priority(pool: PoolState) -> tuple[bool, int, int]:
    """Sort key for the next start: pools with waiting requests, then fewest instances, then the oldest request."""
    return (pool.head is None, pool.count, pool.head.order if pool.head is not None else 0)
