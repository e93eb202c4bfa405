"""`RayManager("shared")`: one manager for the chains of many processes on many nodes.

    process ──► desk (an actor): may I have a Counter?  Here is the handle of one.
       └──────► Counter (an actor): reset, press, …     directly, past the desk

The first process that uses the name makes the desk. It ends when the last process has closed its manager or died, and
all instances with it. A process that dies holding instances has them taken away.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import itertools
import threading
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from agentfly.environment import Environment, Housed, Pool
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.figures import Figures, Holder
from agentfly.resources.instance import Instance
from agentfly.resources.leases import Lender
from agentfly.resources.manager import Here, ResourceManager
from agentfly.resources.on_ray.cluster import MOST_AT_ONCE, NAMESPACE, Lost, answered, entered, installed, kill, sent
from agentfly.resources.on_ray.desk import Desk, Grant, Pulse, Shipment
from agentfly.resources.on_ray.place import OnRay
from agentfly.resources.on_ray.seat import Way
from agentfly.resources.remote.shipping import dumps, modules_by_value
from agentfly.resources.remote.stand_in import attached
from agentfly.resources.stock import Stock
from agentfly.threads import call

_JOINING = 60.0
"""Seconds within which the desk must have taken this process in."""
_TELLING = 10.0
"""Seconds that whoever asks for figures is kept waiting for them."""
_ATTEMPTS = 3
"""How often another desk is tried where one ended, for want of clients, as this one came."""


class RayManager(ResourceManager):
    """This process's way to a manager that others share."""

    def __init__(
        self,
        name: str = "shared",
        pools: Mapping[type[Environment], Pool] | None = None,
        *,
        instances: int | None = None,
        memory: int | None = None,
    ) -> None:
        """`name`: whoever gives the same name in the same cluster shares the instances.

        `instances`, `memory`: as for any manager; whoever comes first decides, the others say the same or nothing.
        """
        super().__init__(pools, instances=instances, memory=memory)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a RayManager is known by a name, such as 'shared', not by {name!r}")
        self.name = name
        self._client, self._requests = uuid.uuid4().hex, itertools.count(1)
        self._desk: Any = None
        """The actor; None while this process has not joined."""
        self._pulse: Any = None
        self._joining = threading.Lock()
        self._stocks: dict[type[Environment], Stock] = {}
        self._opened: set[type[Environment]] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        budget = {"instances": self.budget.instances, "memory": self.budget.memory}
        return _again, (self.name, self.pools, budget)

    @property
    def live(self) -> int:
        """Instances made and not yet closed, whoever has them."""
        return sum(each.starting + each.warm + each.lent + each.closing for each in self.figures())

    def figures(self) -> list[Figures]:
        """Every pool as it is at the desk, with the times of this process's own resets and steps."""
        desk = self._desk
        if desk is None:
            return []
        try:
            found = _got(sent(desk, "figures", self._client), _TELLING)
        except Lost as lost:
            raise self._unreachable(desk, lost) from lost
        for kind, stock in self._stocks.items():
            if (name := _known_by(kind)) in found:
                own = {"reset": stock.reset.summary, "step": stock.step.summary}
                found[name] = replace(found[name], seconds={**found[name].seconds, **own})
        return list(found.values())

    async def warm_up(self, kinds: Iterable[type[Environment]]) -> None:
        """Begin to start what these environments' pools keep warm, and go on without waiting for it."""
        names = [await self._open_there(kind) for kind in kinds]
        await self._ask(await self._reached(), "prepare", names)

    async def close(self) -> None:
        """Leave. What this process still has is ended; so is everything where it was the last."""
        desk, self._desk, pulse = self._desk, None, self._pulse
        self._opened.clear()
        if desk is None:
            return
        try:
            with contextlib.suppress(Lost):  # a desk that is dead has nothing left to close
                await answered(sent(desk, "leave", self._client))
        finally:
            kill(pulse)

    # ── lending ──

    @property
    def _lender(self) -> Lender:
        return self

    def stock(self, kind: type[Environment]) -> Stock:
        """The settings of a pool, and how long resets and steps took here. Its instances are the desk's."""
        if kind not in self._stocks:
            self._stocks[kind] = self._open(kind)
        return self._stocks[kind]

    def _open(self, kind: type[Environment]) -> Stock:
        stock = super()._open(kind)
        place = OnRay() if isinstance(stock.place, Here) else stock.place
        if not isinstance(place, OnRay):
            raise ConfigError(
                f"{kind.__name__} lives in {place.name!r}; what a RayManager lends lives in Ray actors: write "
                "place=OnRay(…), or nothing"
            )
        if stock.shared and not stock.pool.concurrent:
            raise ConfigError(
                f"{kind.__name__} is everybody's, and chains of several processes cannot take turns in it; write "
                "concurrent=True if it can bear that, or scope='group'"
            )
        return Stock(kind, replace(stock.pool, place=place), place)

    async def acquire(
        self, kinds: Sequence[type[Environment]], holder: Holder, order: int | None = None
    ) -> tuple[int, list[Instance]]:
        """One instance of each kind, all at once, and the place in the order of asking that they were got by."""
        names = [await self._open_there(kind) for kind in kinds]
        request, desk, granted = next(self._requests), await self._reached(), False
        try:
            place, grants = await self._ask(desk, "acquire", request, names, holder, order)
            granted = True
            instances = [await self._lent(kind, grant, desk) for kind, grant in zip(kinds, grants, strict=True)]
        except BaseException as error:
            if granted or isinstance(error, asyncio.CancelledError):
                _tell(desk, "withdraw", self._client, request)
            raise
        return place, instances

    async def _lent(self, kind: type[Environment], grant: Grant, desk: Any) -> Instance:
        environment, remote = attached(kind, Way(grant.seat, grant.what), everything=True)
        if self.stock(kind).shared:  # nobody resets it: ask for anything, so as to see its attributes
            await remote.ask("get", "__doc__", (), {})
        instance = Instance(kind, _Lent(environment, desk))
        instance.number = grant.number
        return instance

    def give_back(self, instance: Instance, holder: Holder) -> None:
        """Take an instance back from one who had it."""
        desk = cast("_Lent", instance.housed).desk
        _tell(desk, "give_back", self._client, instance.number, holder, instance.spoiled)

    # ── the way to the desk ──

    async def _open_there(self, kind: type[Environment]) -> str:
        """The name that the desk knows a class by, once it does."""
        if kind not in self._opened:
            shipped = dumps(kind, modules_by_value(kind, everything=True), kind.__name__)
            shipment = Shipment(_known_by(kind), _source(kind), self.stock(kind).pool, shipped)
            await self._ask(await self._reached(), "open", shipment)
            self._opened.add(kind)
        return _known_by(kind)

    async def _ask(self, desk: Any, method: str, *args: Any) -> Any:
        try:
            return await answered(sent(desk, method, self._client, *args))
        except Lost as lost:
            raise self._unreachable(desk, lost) from lost

    async def _reached(self) -> Any:
        return self._desk or await call(self._joined)

    def _joined(self) -> Any:
        """The desk, which has taken this process in. Blocks."""
        ray, attempts = entered(), itertools.count(1)
        with self._joining:
            while self._desk is None:
                try:
                    self._join(ray)
                except Lost as lost:
                    if next(attempts) == _ATTEMPTS:
                        raise self._unreachable(None, lost) from lost
            return self._desk

    def _join(self, ray: Any) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        named = {"name": self.name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
        near = {"num_cpus": 0, "scheduling_strategy": OnNode(ray.get_runtime_context().get_node_id(), soft=False)}
        desk = ray.remote(Desk).options(max_concurrency=MOST_AT_ONCE, **near, **named).remote(self.budget)
        pulse = ray.remote(Pulse).options(**near).remote()
        _got(sent(desk, "join", self._client, pulse, self.budget), _JOINING)
        self._desk, self._pulse = desk, pulse
        weakref.finalize(self, kill, pulse)  # a worker of Ray's outlives the task that dropped its manager

    def _unreachable(self, desk: Any, lost: Lost) -> EnvironmentFault:
        """The fault to raise. Where the desk is dead, whoever asks next finds or makes another."""
        if lost.dead and desk is self._desk:
            self._desk = None
            self._opened.clear()
        return EnvironmentFault(f"the manager {self.name!r} cannot be reached: {lost}")


def _got(answer: Any, seconds: float) -> Any:
    """What `sent` asked for. Blocks."""
    ray = installed()
    try:
        return ray.get(answer, timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise Lost.of(error) from error


def _tell(desk: Any, method: str, *args: Any) -> None:
    """Send word. A desk that is gone has no need of it."""
    with contextlib.suppress(Lost):
        sent(desk, method, *args)


class _Lent(Housed):
    """An instance that was lent, and the desk it goes back to: by then this process may have another."""

    def __init__(self, environment: Environment, desk: Any) -> None:
        super().__init__(environment)
        self.desk = desk


def _again(name: str, pools: Mapping[type[Environment], Pool], budget: dict[str, int | None]) -> RayManager:
    return RayManager(name, pools, **budget)


def _known_by(kind: type[Environment]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _source(kind: type[Environment]) -> str:
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()
    except (OSError, TypeError):
        return ""
