"""Global limits over all pools of a manager, and which pool may start the next instance.

The next instance goes to the pool that has waiting requests and the fewest instances, so that no pool starves; ties go
to the longest waiting request. An instance that an older request waits for is never evicted in favor of a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentfly.errors import ConfigError
from agentfly.resources.pool import PoolState


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits over all pools together."""

    instances: int | None = None
    """Maximum number of instances; None: no limit."""
    memory: int | None = None
    """Bytes, as declared by `Pool.memory` for each instance; None: no limit."""

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
        if self.instances is not None and sum(each.count for each in existing) >= self.instances:
            return False
        used = sum(each.count * each.memory_per_instance for each in existing)
        return self.memory is None or used + pool.memory_per_instance <= self.memory

    def find_evictable(self, pool: PoolState, pools: Iterable[PoolState]) -> PoolState | None:
        """Another pool with an idle instance that may be closed to make room for `pool`; None if there is none."""
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
        mine = pool.head
        existing = list(pools)
        for other in existing:
            theirs = other.head
            if other is pool or theirs is None or other.num_to_start() <= 0 or self.fits(other, existing):
                continue
            if mine is None or pool.count - other.count >= 2 or (other.count == 0 and theirs < mine):
                return True
        return False


def priority(pool: PoolState) -> tuple[bool, int, int]:
    """Sort key for the next start: pools with waiting requests, then fewest instances, then the oldest request."""
    return (pool.head is None, pool.count, pool.head.order if pool.head is not None else 0)
