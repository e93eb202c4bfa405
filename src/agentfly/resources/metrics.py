"""Metrics of the instance pools: current counts, totals and latency histograms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

_FIRST = 1e-6
"""Upper bound of the first bucket, in seconds."""
_GROWTH = 1.25
_LOG = math.log(_GROWTH)
_BUCKETS = 96


class Histogram:
    """Latency histogram with exponential buckets from 1 µs to half an hour, each 25 % wider than the previous one."""

    __slots__ = ("_buckets", "count", "maximum", "total")

    def __init__(self) -> None:
        self._buckets = [0] * _BUCKETS
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0

    def add(self, seconds: float) -> None:
        """Record one duration."""
        bucket = int(math.log(seconds / _FIRST) / _LOG) if seconds > _FIRST else 0
        self._buckets[min(bucket, _BUCKETS - 1)] += 1
        self.count += 1
        self.total += seconds
        if seconds > self.maximum:
            self.maximum = seconds

    def quantile(self, q: float) -> float:
        """The `q` quantile (0 to 1) in seconds, accurate to the width of a bucket. 0 if nothing was recorded."""
        left = q * self.count
        for bucket, count in enumerate(self._buckets):
            left -= count
            if count and left <= 0:
                return min(_FIRST * _GROWTH ** (bucket + 1), self.maximum)
        return self.maximum

    @property
    def summary(self) -> dict[str, float]:
        """Count, mean, p50, p95 and max."""
        return {
            "count": self.count,
            "mean": self.total / self.count if self.count else 0.0,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": self.maximum,
        }


@dataclass(frozen=True, slots=True)
class Holder:
    """The chain that holds a lease or waits for one."""

    chain: str = ""
    """The chain's id. Empty for a lease outside a rollout, for example from the command line."""
    task: str = ""

    def __str__(self) -> str:
        return f"chain {self.chain} ({self.task})" if self.chain else self.task or "an unnamed holder"


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A current lease."""

    instance: int
    holders: tuple[Holder, ...]
    seconds: float
    """Age of the lease."""

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.holders[:3]))} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """State of one pool at one moment."""

    environment: str
    runtime: str
    starting: int
    warm: int
    """Started and idle."""
    leased: int
    closing: int
    waiting: int
    """Chains in the queue."""
    max_instances: int | None
    """None: no limit."""
    memory: int | None
    """Bytes used by all instances. None if the runtime cannot measure it."""
    started: int
    """Instances started since the pool was created. The following counts are totals as well."""
    total_leases: int
    evicted: int
    """Instances closed because they were dead, hung, or unfit for reuse."""
    failed_starts: int
    failed_closes: int
    timeouts: int
    """Chains that waited longer than `wait_timeout`."""
    broken: str = ""
    """Why no instance can be started. Empty while starts are possible."""
    misconfigured: bool = False
    """Whether the cause is a configuration error, such as a missing extra, which no retry fixes."""
    leases: tuple[LeaseInfo, ...] = ()
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Histogram summaries of `wait`, `start`, `reset` and `step`: count, mean, p50, p95 and max."""

    @property
    def scalars(self) -> dict[str, float]:
        """Flat metrics for a logger, such as `Counter/waiting` and `Counter/reset_p95`."""
        names = ("starting", "warm", "leased", "waiting", "evicted", "failed_starts", "timeouts", "memory")
        counts = {name: float(value) for name in names if (value := getattr(self, name)) is not None}
        times = {f"{name}_{key}": of[key] for name, of in self.seconds.items() for key in ("mean", "p95", "max")}
        return {f"{self.environment}/{name}": value for name, value in {**counts, **times}.items()}
