"""What one chain has been lent: the same instance for every tool and reward that asks, until the chain has ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, cast

from agentfly.environment import Environment, Scope
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.resources.figures import Holder
from agentfly.resources.instance import Instance
from agentfly.resources.stock import QueueTimeout, Stock
from agentfly.types import Task

E = TypeVar("E", bound=Environment)
T = TypeVar("T")
Kinds = Sequence[type[Environment]]
Held = dict[type[Environment], Instance]


class Lender(Protocol):
    """Where instances come from and go back to."""

    async def acquire(self, kinds: Kinds, holder: Holder, order: int | None = None) -> tuple[int, list[Instance]]:
        """One instance of each kind, all at once, and the place in the order of asking that they were got by.

        `order`: the place of a request to go on with, for somebody who has got part of what he needs before.
        """
        ...

    def give_back(self, instance: Instance, holder: Holder) -> None:
        """Take an instance back from one who had it."""
        ...

    def stock(self, kind: type[Environment]) -> Stock:
        """The pool of an environment."""
        ...


class Group:
    """What the chains of one task share in one run. Close it when the last of them has ended."""

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._held: Held = {}
        self._holder = Holder()
        self._order: int | None = None
        self._asking = False
        """Whether a chain is asking for the group's instances at the moment."""
        self._users = 0
        self._changed = asyncio.Event()

    async def join(self, shared: Kinds, own: Kinds, task: Task, holder: Holder) -> Held:
        """The group's instances and the chain's own. The first chain asks for both at once.

        While a group has instances that others wait for, its chains go before those others: they take the group's place
        in the order of asking. Instances that died are given back when the last chain that has them has ended; until
        then a chain that needs others waits, and holds nothing.
        """
        await self._turn(shared)
        if not self._held:
            self._asking = True
            try:
                order, got = await _acquired(self._lender, [*own, *shared], task, holder, None)
            finally:
                self._asking = False
                self._changed.set()
            self._held = {kind: got.pop(kind) for kind in shared}
            self._holder, self._order = holder, order
            self._users += 1
            return {**got, **self._held}
        held = {kind: self._held[kind] for kind in shared}
        self._users += 1
        try:
            _, got = await _acquired(self._lender, own, task, holder, self._order) if own else (0, {})
        except BaseException:
            self.leave()
            raise
        return {**got, **held}

    async def _turn(self, shared: Kinds) -> None:
        """Wait until no other chain asks for the group's instances, nor uses what died; that goes back then."""
        if self._held and (lacking := [kind.__name__ for kind in shared if kind not in self._held]):
            raise ConfigError(f"the chains of a group share the same environments; the first had no {lacking[0]}")
        seconds = min(self._lender.stock(kind).pool.wait_timeout for kind in shared)
        try:
            async with asyncio.timeout(seconds):
                while self._asking or (self._users and self._died):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            names = " and ".join(kind.__name__ for kind in shared)
            busy = "another chain of its group still waits for it" if self._asking else "it died in use"
            users = f", and {self._users} chains of its group still have it" if self._users else ""
            raise QueueTimeout(f"no {names} was free within {seconds:g} s: {busy}{users}") from None
        if self._died:
            self.close()

    @property
    def _died(self) -> bool:
        return any(instance.spoiled for instance in self._held.values())

    def leave(self) -> None:
        """A chain has ended."""
        self._users -= 1
        self._changed.set()

    def close(self) -> None:
        """Give the group's instances back."""
        held, self._held, self._order = self._held, {}, None
        for instance in held.values():
            self._lender.give_back(instance, self._holder)


class Leases:
    """What one chain has been lent."""

    __slots__ = ("_acquiring", "_group", "_held", "_holder", "_joined", "_lender", "_plan", "_task")

    def __init__(
        self, lender: Lender, task: Task, plan: Iterable[type[Environment]], group: Group | None, chain: str
    ) -> None:
        self._lender, self._task, self._group = lender, task, group
        self._plan = tuple(dict.fromkeys(plan))
        self._holder = Holder(chain, _called(task))
        self._held: Held = {}
        self._joined = False
        self._acquiring: asyncio.Lock | None = None
        """Made by the first who asks: most chains that have no environment have no need of it."""

    async def get(self, kind: type[E]) -> E:
        """The chain's instance of `kind`. The first asking acquires everything the chain may need, all at once."""
        if kind not in self._held:
            await self._acquire(kind)
        return cast("E", self._held[kind].environment)

    async def act(self, kinds: Kinds, action: Callable[[Mapping[type[Environment], Environment]], Awaitable[T]]) -> T:
        """Do something in the chain's instances of `kinds`. What is shared and not made for it is acted in by turns.

        An instance in which an action failed as a fault is not lent again; nor is one in which an action was given up
        in the middle, unless it is made for several at once, of whom one going away is nothing to the others.
        """
        environments = {kind: await self.get(kind) for kind in kinds}
        instances = [self._held[kind] for kind in kinds]
        async with contextlib.AsyncExitStack() as turns:
            for instance in sorted(instances, key=lambda each: each.number):
                pool = self._lender.stock(instance.kind).pool
                if pool.scope is not Scope.CHAIN and not pool.concurrent:
                    await turns.enter_async_context(instance.turns)
            begun = time.monotonic()
            try:
                return await action(environments)
            except (EnvironmentFault, asyncio.CancelledError) as error:
                for instance in instances:
                    if isinstance(error, EnvironmentFault) or not self._lender.stock(instance.kind).pool.concurrent:
                        instance.spoiled = instance.spoiled or describe(error)
                raise
            finally:
                for instance in instances:
                    self._lender.stock(instance.kind).step.add(time.monotonic() - begun)

    async def _acquire(self, kind: type[Environment]) -> None:
        self._acquiring = self._acquiring or asyncio.Lock()
        async with self._acquiring:
            if kind in self._held:
                return
            if self._plan and kind not in self._plan:
                there = ", ".join(each.__name__ for each in self._plan)
                raise ConfigError(f"this chain has {there}; {kind.__name__} would have to be in the plan of its leases")
            plan = self._plan or (kind,)
            if self._held:
                raise ConfigError("name all environments a chain may need when its leases are made")
            scopes = {each: self._lender.stock(each).pool.scope for each in plan}
            shared = [each for each in plan if scopes[each] is Scope.GROUP]
            own = [each for each in plan if scopes[each] is not Scope.GROUP]
            if shared and self._group is None:
                raise ConfigError(f"{shared[0].__name__} is shared by a group, and this chain belongs to none")
            if shared and self._group is not None:
                self._held = await self._group.join(shared, own, self._task, self._holder)
                self._joined = True
            else:
                _, self._held = await _acquired(self._lender, own, self._task, self._holder, None)

    async def release(self) -> None:
        """Give everything back."""
        held, self._held = self._held, {}
        for kind, instance in held.items():
            if self._lender.stock(kind).pool.scope is not Scope.GROUP:
                self._lender.give_back(instance, self._holder)
        if self._joined and self._group is not None:
            self._joined = False
            self._group.leave()

    async def __aenter__(self) -> Leases:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


async def _acquired(lender: Lender, kinds: Kinds, task: Task, holder: Holder, order: int | None) -> tuple[int, Held]:
    """One instance of each kind, reset for the task. Where one cannot be, all go back."""
    order, instances = await lender.acquire(kinds, holder, order)
    try:
        for instance in instances:
            stock = lender.stock(instance.kind)
            if stock.shared:
                continue
            begun = time.monotonic()
            try:
                await instance.step("reset", stock.pool.reset_timeout, task)
            except BaseException as error:
                instance.spoiled = describe(error)
                raise
            stock.reset.add(time.monotonic() - begun)
    except BaseException:
        for instance in instances:
            lender.give_back(instance, holder)
        raise
    return order, dict(zip(kinds, instances, strict=True))


def _called(task: Task) -> str:
    return task.id or f"{task.question[:40]!r}"
