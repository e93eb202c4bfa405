"""The actor that is a shared manager. It lends actors to clients, and takes back what a client that died had.

It never loads a user's class: it passes on what a client shipped, and calls `start`, `check` and `close` by name.
Chains reach their instances directly; only asking and giving back come here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from agentfly.environment import Environment, Housed, Pool
from agentfly.errors import ConfigError, EnvironmentFault
from agentfly.resources.budget import Budget
from agentfly.resources.exchange import Exchange
from agentfly.resources.figures import Figures, Holder
from agentfly.resources.instance import Instance
from agentfly.resources.on_ray.cluster import Lost, answered, installed, kill, sent
from agentfly.resources.on_ray.place import OnRay, Seated
from agentfly.resources.stock import Stock

LINGER = 2.0
"""Seconds for which a manager without clients waits for one before it ends itself."""


class Pulse:
    """A client's sign of life: it is owned by the client's process, and dies with it."""

    async def stay(self) -> None:
        """Never return."""
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class Shipment:
    """A class, ready for the way to where its instances will live."""

    name: str
    """Module and qualified name: what it is known by in every process."""
    source: str
    """A digest of its source; empty where there is none to read."""
    pool: Pool
    shipped: bytes


class Grant(NamedTuple):
    """An instance that was lent, for the client."""

    number: int
    seat: Any
    what: str


class Lease(NamedTuple):
    """An instance that was lent, as the desk remembers it."""

    request: int
    instance: Instance
    holder: Holder


@dataclass
class Client:
    """One process that lends from here."""

    watch: asyncio.Task[None]
    leases: list[Lease] = field(default_factory=list)
    asking: dict[int, asyncio.Task[tuple[int, list[Grant]]]] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)
    """Requests that were withdrawn before they came: Ray does not promise an order."""


class Shipped:
    """Houses instances of a shipped class."""

    name = "ray"
    max_instances: int | None = None

    def __init__(self, shipment: Shipment) -> None:
        self._shipment = shipment

    async def house(self, kind: type[Environment]) -> Housed:
        """Make an instance in a fresh actor."""
        return await cast("OnRay", self._shipment.pool.place).seat(kind, self._shipment.shipped)


class Desk:
    """The manager. All its methods run in one event loop."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._exchange = Exchange(budget, self._stock)
        self._shipments: dict[str, Shipment] = {}
        self._kinds: dict[str, type[Environment]] = {}
        self._clients: dict[str, Client] = {}
        self._clear()

    # ── clients ──

    async def join(self, client: str, pulse: Any, budget: Budget) -> None:
        """Take a client in. What it says of the budget must be so."""
        for name in ("instances", "memory"):
            asked, there = getattr(budget, name), getattr(self._budget, name)
            if asked is not None and asked != there:
                raise ConfigError(f"{name}={asked} is asked of a manager that was made with {name}={there}")
        self._clients[client] = Client(asyncio.create_task(self._watch(client, pulse)))

    async def _watch(self, client: str, pulse: Any) -> None:
        while client in self._clients:
            try:
                await answered(sent(pulse, "stay"))
            except Lost as lost:
                if lost.dead:
                    self._bury(client, f"its chain's process died: {lost}")
                else:  # out of reach, for the moment or for good: Ray will know
                    await asyncio.sleep(1)

    async def leave(self, client: str) -> None:
        """Let a client go. With the last one go the instances."""
        if client in self._clients:
            self._clients[client].watch.cancel()
            self._bury(client, "its chain's process closed its manager")
        if not self._clients:
            await asyncio.shield(self._clearing)

    def _bury(self, client: str, why: str) -> None:
        gone = self._clients.pop(client)
        for asking in gone.asking.values():
            asking.cancel()
        for lease in gone.leases:
            self._take_back(lease, why)
        if not self._clients:
            self._clear()

    def _clear(self) -> None:
        """Begin anew, as nobody is left, and end unless somebody comes."""
        exchange, self._exchange = self._exchange, Exchange(self._budget, self._stock)
        self._shipments, self._kinds = {}, {}
        self._clearing = asyncio.create_task(exchange.end())
        self._lingering = asyncio.create_task(self._linger(self._clearing))

    async def _linger(self, clearing: asyncio.Task[None]) -> None:
        await clearing
        await asyncio.sleep(LINGER)
        if not self._clients:
            kill(installed().get_runtime_context().current_actor)

    # ── environments ──

    async def open(self, client: str, shipment: Shipment) -> None:
        """Learn of a class. Every client must mean the same by its name."""
        there = self._shipments.setdefault(shipment.name, shipment)
        for what in ("source", "pool"):
            if getattr(there, what) != getattr(shipment, what):
                raise ConfigError(
                    f"{shipment.name} has another {what} here than in the process that used it first"
                    f"{'' if what == 'source' else f': {shipment.pool}, not {there.pool}'}; processes that share a "
                    "manager must run the same code"
                )
        if shipment.name not in self._kinds:
            short = shipment.name.rpartition(".")[2]
            self._kinds[shipment.name] = type(short, (Environment,), {"known_by": shipment.name})

    def _kind(self, name: str) -> type[Environment]:
        if name not in self._kinds:
            raise EnvironmentFault(f"the manager has begun anew, and does not know {name}")
        return self._kinds[name]

    def _stock(self, kind: type[Environment]) -> Stock:
        shipment = self._shipments[vars(kind)["known_by"]]
        return Stock(kind, shipment.pool, Shipped(shipment))

    async def prepare(self, client: str, names: Sequence[str]) -> None:
        """Begin to start what is to be kept warm."""
        await self._exchange.live()
        self._exchange.prepare([self._kind(name) for name in names])

    async def figures(self, client: str) -> dict[str, Figures]:
        """Every pool as it is, by the name of its class."""
        return {vars(kind)["known_by"]: stock.figures() for kind, stock in self._exchange.stocks.items()}

    # ── lending ──

    async def acquire(
        self, client: str, request: int, names: Sequence[str], holder: Holder, order: int | None
    ) -> tuple[int, list[Grant]]:
        """One instance of each class, all at once."""
        asker = self._clients.get(client)
        if asker is None:
            raise EnvironmentFault("this process has left the manager")
        kinds = [self._kind(name) for name in names]
        asking = asker.asking[request] = asyncio.create_task(self._lend(asker, request, kinds, holder, order))
        if request in asker.withdrawn:
            asking.cancel()
        try:
            return await asking
        except asyncio.CancelledError:
            raise EnvironmentFault("the request was withdrawn") from None
        finally:
            del asker.asking[request]
            asker.withdrawn.discard(request)

    async def _lend(
        self, asker: Client, request: int, kinds: Sequence[type[Environment]], holder: Holder, order: int | None
    ) -> tuple[int, list[Grant]]:
        """Acquire, and remember that in the same breath: nothing comes between that could make it forgotten."""
        order, instances = await self._exchange.acquire(kinds, holder, order)
        asker.leases += [Lease(request, instance, holder) for instance in instances]
        seats = [cast("Seated", instance.housed) for instance in instances]
        return order, [Grant(each.number, seat.seat, seat.what) for each, seat in zip(instances, seats, strict=True)]

    async def withdraw(self, client: str, request: int) -> None:
        """A request is no longer wanted. What it was granted goes back unused."""
        asker = self._clients.get(client)
        if asker is None:
            return
        granted = [lease for lease in asker.leases if lease.request == request]
        for lease in granted:
            asker.leases.remove(lease)
            self._take_back(lease, "")
        if request in asker.asking:
            asker.asking[request].cancel()
        elif not granted:
            asker.withdrawn.add(request)

    async def give_back(self, client: str, number: int, holder: Holder, spoiled: str) -> None:
        """Take an instance back."""
        asker = self._clients.get(client)
        lent = asker.leases if asker is not None else []
        for lease in lent:
            if lease.instance.number == number and lease.holder == holder:
                lent.remove(lease)
                self._take_back(lease, spoiled)
                return

    def _take_back(self, lease: Lease, spoiled: str) -> None:
        lease.instance.spoiled = lease.instance.spoiled or spoiled
        self._exchange.give_back(lease.instance, lease.holder)
