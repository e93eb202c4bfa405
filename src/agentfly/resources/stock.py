"""The instances of one environment: which are idle, lent or on their way, and who waits for one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import deque
from dataclasses import dataclass, field

from agentfly.environment import Environment, Place, Pool, Scope
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.figures import Figures, Histogram, Holder
from agentfly.resources.instance import Instance

ATTEMPTS = 3
"""Starts that fail one after the other, with none alive, before those who wait are told that none can be started."""
BACK_OFF = 0.2
"""Seconds between the first failed start and the next; twice that after the second, and so on."""
LONGEST_BACK_OFF = 30.0
COOL_DOWN = 30.0
"""Seconds for which nobody tries again after the last of these attempts."""
STARTS_AT_ONCE = 64
_numbers = itertools.count()


class QueueTimeout(EnvironmentFault):
    """Nothing was free in time. Says how many waited, and who has what there is."""


class Request:
    """A chain that asks for one instance of each of several environments, all at once."""

    __slots__ = ("_place", "future", "holder", "order", "since", "stocks")

    def __init__(self, order: int, stocks: tuple[Stock, ...], holder: Holder) -> None:
        self.order, self.stocks, self.holder = order, stocks, holder
        self._place = (order, next(_numbers))
        """Where it stands in every queue. The chains of a group share an order: were two of them first in one queue
        each, neither would be first in both."""
        self.since = time.monotonic()
        self.future: asyncio.Future[list[Instance]] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: Request) -> bool:
        return self._place < other._place

    @property
    def open(self) -> bool:
        """Whether it still waits."""
        return not self.future.done()

    @property
    def due(self) -> bool:
        """Whether it is its turn everywhere, and everything it asks for is ready."""
        turns = (stock.ready() and (stock.shared or stock.head is self) for stock in self.stocks)
        return self.open and all(turns)


@dataclass(slots=True)
class Trouble:
    """Starts that failed one after the other."""

    failures: int = 0
    seen: float = 0.0
    """When the last one failed: those that had begun before are part of the same trouble."""
    until: float = 0.0
    """Nobody starts one before."""
    reason: str = ""
    """What the last one died of."""
    broken: bool = False
    """Whether no instance is to be hoped for."""
    misconfigured: bool = False
    """Whether the last one was refused by a ConfigError."""


@dataclass(eq=False)
class Stock:
    """One pool at work. It counts and keeps order; the exchange decides and acts."""

    kind: type[Environment]
    pool: Pool
    place: Place
    idle: deque[Instance] = field(default_factory=deque)
    """Warm and nobody's; the one used last is lent first."""
    lent: dict[int, Instance] = field(default_factory=dict)
    starting: int = 0
    closing: int = 0
    queue: list[Request] = field(default_factory=list)
    """A heap in the order of asking. Those that were served or gave up stay in it until they come up."""
    waiting: int = 0
    trouble: Trouble = field(default_factory=Trouble)
    started: int = 0
    lends: int = 0
    buried: int = 0
    failed_starts: int = 0
    failed_closes: int = 0
    timeouts: int = 0
    wait: Histogram = field(default_factory=Histogram)
    start: Histogram = field(default_factory=Histogram)
    reset: Histogram = field(default_factory=Histogram)
    step: Histogram = field(default_factory=Histogram)

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def shared(self) -> bool:
        """Whether one instance is everybody's."""
        return self.pool.scope is Scope.GLOBAL

    @property
    def count(self) -> int:
        """Instances that there are, in whatever state."""
        return len(self.idle) + len(self.lent) + self.starting + self.closing

    @property
    def most(self) -> int | None:
        """Most instances at once; None: no limit."""
        if self.shared:
            return 1 + sum(bool(each.spoiled) for each in self.lent.values())
        return self.place.max_instances if self.pool.max_instances is None else self.pool.max_instances

    @property
    def head(self) -> Request | None:
        """Whose turn it is, or who asked first for what is everybody's; None: nobody waits."""
        while self.queue and not self.queue[0].open:
            heapq.heappop(self.queue)
        return self.queue[0] if self.queue else None

    def candidates(self) -> list[Request]:
        """The requests that may be served: the first in the queue; of an instance that is everybody's, all."""
        if not self.shared:
            return [self.head] if self.head is not None else []
        return [each for each in sorted(self.queue) if each.open] if self.ready() else []

    def _everybodys(self) -> Instance | None:
        """The instance that is lent and may be lent to others too."""
        return next((each for each in self.lent.values() if not each.spoiled), None) if self.shared else None

    def ready(self) -> bool:
        """Whether an instance could be lent at once."""
        return bool(self.idle) or self._everybodys() is not None

    def take(self, holder: Holder) -> Instance:
        """Lend an instance; there must be one that is ready."""
        instance = self._everybodys()
        if instance is None:
            instance = self.idle.pop()
            instance.lent_at = time.monotonic()
            self.lent[instance.number] = instance
        instance.holders.append(holder)
        instance.uses += 1
        self.lends += 1
        return instance

    def wanted(self) -> int:
        """How many more instances should be started, were there no limits but this pool's own."""
        if self.trouble.until > time.monotonic():
            return 0
        needed = self.waiting
        if self.shared:
            needed = 0 if self._everybodys() else min(self.waiting, 1)
        missing = needed + self.pool.min_warm - len(self.idle) - self.starting
        room = missing if self.most is None else self.most - self.count
        return min(missing, room, STARTS_AT_ONCE - self.starting)

    def fit_again(self, instance: Instance) -> bool:
        """Whether an instance that came back may be lent again."""
        instance.spoiled = instance.spoiled or instance.housed.death() or ""
        worn = self.pool.max_uses is not None and instance.uses >= self.pool.max_uses
        return not instance.spoiled and not worn

    def failed(self, error: BaseException, begun: float) -> None:
        """Take note of a start that failed."""
        self.failed_starts += 1
        trouble, moment = self.trouble, time.monotonic()
        if begun < trouble.seen:
            return
        trouble.failures += 1
        trouble.seen, trouble.reason = moment, str(error)
        trouble.misconfigured = isinstance(error.__cause__ or error, ConfigError)
        hopeless = trouble.failures >= ATTEMPTS or trouble.misconfigured
        trouble.broken = hopeless and not self.idle and not self.lent
        pause = min(BACK_OFF * 2 ** (trouble.failures - 1), LONGEST_BACK_OFF)
        trouble.until = moment + (COOL_DOWN if trouble.broken else pause)

    def refuse_if_broken(self) -> None:
        """Raise at once where waiting would be in vain."""
        if self.trouble.broken and time.monotonic() < self.trouble.until:
            raise self.breakdown()

    def breakdown(self) -> EnvironmentFault:
        """Why no instance can be had, in words."""
        times = f"{self.trouble.failures} starts failed, the last with: " if self.trouble.failures > 1 else ""
        return EnvironmentFault(f"no {self.name} can be started: {times}{self.trouble.reason}")

    def late(self, request: Request, seconds: float) -> QueueTimeout:
        """What to tell a chain that waited too long."""
        self.timeouts += 1
        limit = "" if self.most is None else f" of at most {self.most}"
        holders = "; ".join(str(each.lent) for each in list(self.lent.values())[:8]) or "nobody"
        more = f"; and {len(self.lent) - 8} more" if len(self.lent) > 8 else ""
        others = "" if self.idle else f", {self.starting} starting"
        blocking = next((each for each in request.stocks if each is not self and not each.ready()), None)
        also = f" Its turn at {blocking.name} had not come either." if blocking else ""
        return QueueTimeout(
            f"no {self.name} was free within {seconds:g} s: {self.waiting} chains were waiting{others}, "
            f"{len(self.lent)}{limit} are lent: to {holders}{more}.{also} Raise max_instances or wait_timeout, or run "
            "fewer chains at once."
        )

    def figures(self) -> Figures:
        """The pool as it is."""
        there = [*self.idle, *self.lent.values()]
        sizes = [size for each in there if (size := each.housed.memory()) is not None]
        times = {"wait": self.wait, "start": self.start, "reset": self.reset, "step": self.step}
        return Figures(
            environment=self.name,
            place=self.place.name,
            starting=self.starting,
            warm=len(self.idle),
            lent=len(self.lent),
            closing=self.closing,
            waiting=self.waiting,
            max_instances=self.most,
            memory=sum(sizes) if sizes else None,
            started=self.started,
            lends=self.lends,
            buried=self.buried,
            failed_starts=self.failed_starts,
            failed_closes=self.failed_closes,
            timeouts=self.timeouts,
            broken=str(self.breakdown()) if self.trouble.broken else "",
            misconfigured=self.trouble.broken and self.trouble.misconfigured,
            leases=tuple(each.lent for each in self.lent.values()),
            seconds={name: histogram.summary for name, histogram in times.items()},
        )
