"""What a manager can tell of its pools: counts as they are, and how long things took."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

_FIRST = 1e-6
_GROWTH = 1.25
_LOG = math.log(_GROWTH)
_BUCKETS = 96


class Histogram:
    """How often something took how long: a microsecond to half an hour, each bucket a quarter wider than the last."""

    __slots__ = ("_buckets", "count", "most", "total")

    def __init__(self) -> None:
        self._buckets = [0] * _BUCKETS
        self.count, self.total, self.most = 0, 0.0, 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = int(math.log(seconds / _FIRST) / _LOG) if seconds > _FIRST else 0
        self._buckets[min(bucket, _BUCKETS - 1)] += 1
        self.count += 1
        self.total += seconds
        if seconds > self.most:
            self.most = seconds

    def quantile(self, share: float) -> float:
        """Seconds that `share` of all took at most, to a quarter; 0 where there were none."""
        left = share * self.count
        for bucket, count in enumerate(self._buckets):
            left -= count
            if count and left <= 0:
                return min(_FIRST * _GROWTH ** (bucket + 1), self.most)
        return self.most

    @property
    def summary(self) -> dict[str, float]:
        """Its figures for a table or a log."""
        mean = self.total / self.count if self.count else 0.0
        return {
            "count": self.count,
            "mean": mean,
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": self.most,
        }


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose an instance is, or who waits for one."""

    chain: str = ""
    """The chain's id; empty where an instance is asked for by hand."""
    task: str = ""

    def __str__(self) -> str:
        return f"chain {self.chain} ({self.task})" if self.chain else self.task or "somebody"


@dataclass(frozen=True, slots=True)
class Lent:
    """An instance that is somebody's at the moment."""

    instance: int
    holders: tuple[Holder, ...]
    seconds: float
    """How long it has been lent."""

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.holders[:3]))} for {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Figures:
    """One pool as it is."""

    environment: str
    place: str
    starting: int
    warm: int
    lent: int
    closing: int
    waiting: int
    """Chains in the queue."""
    max_instances: int | None
    """None: no limit."""
    memory: int | None
    """Bytes that all instances hold; None where nobody can tell."""
    started: int
    """Instances that were ever started, as the following are counts since the beginning."""
    lends: int
    buried: int
    """Instances that were closed because they were dead, hung, or unfit to be lent again."""
    failed_starts: int
    failed_closes: int
    timeouts: int
    """Chains that gave up waiting."""
    broken: str = ""
    """Why no instance can be started; empty while one can."""
    misconfigured: bool = False
    """Whether that is a mistake of the configuration, such as a missing extra, which no retry mends."""
    leases: tuple[Lent, ...] = ()
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of `wait`, `start`, `reset` and `step`: count, mean, p50, p95 and max."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @property
    def metrics(self) -> dict[str, float]:
        """As flat numbers, for a log of metrics."""
        names = ("starting", "warm", "lent", "waiting", "buried", "failed_starts", "timeouts", "memory")
        counts = {name: float(value) for name in names if (value := getattr(self, name)) is not None}
        times = {f"{name}_{key}": of[key] for name, of in self.seconds.items() for key in ("mean", "p95", "max")}
        return {f"{self.environment}/{name}": value for name, value in {**counts, **times}.items()}
