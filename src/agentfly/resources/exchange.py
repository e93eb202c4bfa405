"""Who gets which instance, and when: the queues, the budget, and the lives of all instances of one event loop.

Deadlock is impossible because nobody waits while holding: a chain asks for one instance of every environment it may
touch, all at once, and gets all of them in one step or none. Requests are served in the order of asking: one is served
when it is the first in the queue of each environment it asks for and each has an instance ready. The oldest request of
all is therefore always first wherever it waits, and what it waits for is with somebody who waits for nothing, on its
way, or can be made room for.
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
from weakref import WeakMethod

from agentfly.environment import Environment, Recycle
from agentfly.errors import EnvironmentFault, describe
from agentfly.resources import status
from agentfly.resources.budget import Budget, need
from agentfly.resources.figures import Figures, Holder
from agentfly.resources.instance import Instance
from agentfly.resources.stock import Request, Stock

CHECK_AFTER = 5.0
"""Seconds of idleness after which an instance is asked whether it is well before it is lent."""
REST_AFTER = 2.0
"""Seconds of idleness after which an instance is put to rest."""
_LOG = logging.getLogger(__name__)


class Exchange:
    """All pools of one manager in one event loop."""

    def __init__(self, budget: Budget, open_stock: Callable[[type[Environment]], Stock]) -> None:
        self._budget, self._open_stock = budget, open_stock
        self.stocks: dict[type[Environment], Stock] = {}
        self._instances: set[Instance] = set()
        """All that were made and are not ended."""
        self._order = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._burials: dict[Instance, asyncio.Task[None]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        self._life: AsyncGenerator[None, None] | None = None

    async def live(self) -> None:
        """Be closed when the event loop shuts down, should nobody do so before: a loop ends its generators."""
        if self._life is None:
            self._life = self._living()
            await anext(self._life)
            self._spawn(status.serve(WeakMethod(self.figures)))  # weak: who looks on must not keep a manager alive

    async def _living(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._close()

    def stock(self, kind: type[Environment]) -> Stock:
        """The pool of an environment."""
        if kind not in self.stocks:
            self.stocks[kind] = self._open_stock(kind)
        return self.stocks[kind]

    @property
    def count(self) -> int:
        """Instances that there are, in whatever state."""
        return sum(stock.count for stock in self.stocks.values())

    def figures(self) -> list[Figures]:
        """Every pool as it is."""
        return [stock.figures() for stock in self.stocks.values()]

    def prepare(self, kinds: Iterable[type[Environment]]) -> None:
        """Begin to start what is to be kept warm."""
        self._stock_up(*map(self.stock, kinds))

    # ── asking ──

    async def acquire(
        self, kinds: Sequence[type[Environment]], holder: Holder, order: int | None = None
    ) -> tuple[int, list[Instance]]:
        """One instance of each kind, all at once, and the place in the order of asking that they were got by.

        `order`: the place of a request to go on with, for somebody who has got part of what he needs before.
        """
        await self.live()
        request = Request(next(self._order) if order is None else order, tuple(map(self.stock, kinds)), holder)
        while True:
            self._refuse_in_vain(request)
            instances = await self._wait(request)
            if await self._well(instances, holder):
                break
            request = Request(request.order, request.stocks, holder)
        waited = time.monotonic() - request.since
        for stock in request.stocks:
            stock.wait.add(waited)
        return request.order, instances

    def _refuse_in_vain(self, request: Request) -> None:
        if self._closed:
            raise EnvironmentFault("this manager is closed")
        for stock in request.stocks:
            stock.refuse_if_broken()
        self._budget.refuse_what_never_fits(request.stocks)

    async def _wait(self, request: Request) -> list[Instance]:
        for stock in request.stocks:
            stock.waiting += 1
            heapq.heappush(stock.queue, request)
        self._grant(request)
        self._stock_up(*request.stocks)
        if request.open:
            seconds = min(stock.pool.wait_timeout for stock in request.stocks)
            alarm = asyncio.get_running_loop().call_later(seconds, self._expire, request, seconds)
            try:
                await request.future
            except asyncio.CancelledError:
                self._withdraw(request)
                raise
            finally:
                alarm.cancel()
        return request.future.result()

    def _expire(self, request: Request, seconds: float) -> None:
        if request.open:
            short = next((each for each in request.stocks if not each.ready()), request.stocks[0])
            self._fail(request, short.late(request, seconds))

    def _fail(self, request: Request, error: Exception) -> None:
        request.future.set_exception(error)
        self._dequeued(request)

    def _withdraw(self, request: Request) -> None:
        """The one who asked is gone. What was granted meanwhile goes back."""
        if request.future.cancelled():
            self._dequeued(request)
        elif request.future.exception() is None:
            for instance in request.future.result():
                self.give_back(instance, request.holder)

    def _dequeued(self, request: Request) -> None:
        for stock in request.stocks:
            stock.waiting -= 1
        self._serve(*(stock for stock in request.stocks if not stock.shared))  # of what is shared nobody had a turn

    async def _well(self, instances: list[Instance], holder: Holder) -> bool:
        """Whether all may be used. Where one may not it is buried, and the others go back for the time being."""
        try:
            for instance in instances:
                timeout = self.stock(instance.kind).pool.reset_timeout
                if instance.resting is not None:
                    await instance.wake(timeout)
                if death := instance.spoiled or instance.housed.death():
                    raise EnvironmentFault(death)
                if time.monotonic() - instance.idle_since > CHECK_AFTER and len(instance.holders) == 1:
                    await instance.step("check", timeout)
        except BaseException as error:
            instance.spoiled = instance.spoiled or describe(error)
            for each in instances:
                self.give_back(each, holder)
            if not isinstance(error, Exception):
                raise
            _LOG.warning("%r was idle and is no longer well: %s", instance, error)
            return False
        return True

    # ── serving ──

    def _serve(self, *stocks: Stock) -> None:
        """Grant what can be granted at these pools, and start what is missing for the rest."""
        if self._closed:
            return
        self._grant(*(request for stock in stocks for request in stock.candidates()))
        self._stock_up(*stocks)

    def _grant(self, *requests: Request) -> None:
        """Grant those whose turn it is everywhere and for whom everything is ready; then perhaps those behind them."""
        turn = deque(requests)
        while turn:
            request = turn.popleft()
            if not request.due:
                continue
            request.future.set_result([stock.take(request.holder) for stock in request.stocks])
            for stock in request.stocks:
                stock.waiting -= 1
                if stock.head is not None:
                    turn.append(stock.head)

    def _stock_up(self, *stocks: Stock) -> None:
        """Start what is missing at these pools; under a budget, at all of them, as long as there is room."""
        if self._closed:
            return
        if self._budget.unlimited:
            for stock in stocks:
                for _ in range(stock.wanted()):
                    self._begin(stock)
            return
        while needy := [stock for stock in self.stocks.values() if stock.wanted() > 0]:
            stock = min(needy, key=need)
            if not self._budget.fits(stock, self.stocks.values()):
                self._make_room(stock)
                return
            self._begin(stock)

    def _begin(self, stock: Stock) -> None:
        stock.starting += 1
        self._spawn(self._start(stock, time.monotonic()))

    def _make_room(self, stock: Stock) -> None:
        """Close an idle instance of another pool, unless one is being closed already."""
        if not any(each.closing for each in self.stocks.values()):
            spare = self._budget.spare_for(stock, self.stocks.values())
            if spare is not None:
                self._bury(spare, spare.idle.popleft())

    async def _start(self, stock: Stock, begun: float) -> None:
        """Make and start one instance; what cannot be started is ended, and tried again later."""
        instance = None
        try:
            async with asyncio.timeout(stock.pool.start_timeout) as limit:
                instance = Instance(stock.kind, await stock.place.house(stock.kind))
            self._instances.add(instance)
            await instance.step("start", stock.pool.start_timeout)
        except BaseException as error:
            if isinstance(error, TimeoutError) and instance is None and limit.expired():
                error = EnvironmentFault(f"{stock.name} found no place to live within {stock.pool.start_timeout:g} s")
            self._not_started(stock, instance, error, begun)
            if not isinstance(error, Exception):
                raise
        else:
            stock.starting -= 1
            stock.started += 1
            stock.start.add(time.monotonic() - begun)
            stock.trouble.failures, stock.trouble.broken = 0, False
            self._idle(stock, instance)
        self._serve(stock)

    def _not_started(self, stock: Stock, instance: Instance | None, error: BaseException, begun: float) -> None:
        stock.starting -= 1
        if instance is not None:
            instance.spoiled = describe(error)
            self._bury(stock, instance)
        if not isinstance(error, Exception):
            return
        if instance is None and not isinstance(error, EnvironmentFault):
            fault = EnvironmentFault(f"{stock.name}() failed: {describe(error)}")
            fault.__cause__ = error
            error = fault
        stock.failed(error, begun)
        _LOG.warning("a start of %s failed: %s", stock.name, error)
        if stock.trouble.broken:
            for request in [each for each in stock.queue if each.open]:
                self._fail(request, stock.breakdown())
        else:
            pause = max(stock.trouble.until - time.monotonic(), 0.0)
            asyncio.get_running_loop().call_later(pause, self._serve, stock)

    # ── taking back ──

    def give_back(self, instance: Instance, holder: Holder) -> None:
        """Take an instance back from one who had it; the last one's giving back ends the lease."""
        instance.holders.remove(holder)
        stock = self.stock(instance.kind)
        if instance.number not in stock.lent:
            return
        if instance.holders:
            self._stock_up(stock)  # where it died, somebody may wait for another
            return
        over = self._budget.owes(stock, self.stocks.values()) or stock.pool.recycle is Recycle.REPLACE
        del stock.lent[instance.number]
        if self._closed or over or not stock.fit_again(instance):
            self._bury(stock, instance)
        else:
            self._idle(stock, instance)
        self._serve(stock)

    def _idle(self, stock: Stock, instance: Instance) -> None:
        instance.idle_since = time.monotonic()
        stock.idle.append(instance)
        if self._sweeping is None and not self._closed:
            seconds = min(max(stock.pool.idle_seconds / 4, 0.01), REST_AFTER)
            self._sweeping = asyncio.get_running_loop().call_later(seconds, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long or has died, put the rest to rest, and refill."""
        self._sweeping, moment, soon = None, time.monotonic(), REST_AFTER
        for stock in self.stocks.values():
            for instance in list(stock.idle):
                idle = moment - instance.idle_since
                instance.spoiled = instance.spoiled or instance.housed.death() or ""
                spare = len(stock.idle) > stock.pool.min_warm and stock.head is None
                if instance.spoiled or (spare and idle >= stock.pool.idle_seconds):
                    stock.idle.remove(instance)
                    self._bury(stock, instance)
                elif idle >= REST_AFTER and instance.resting is None:
                    instance.resting = self._spawn(instance.rest(stock.pool.reset_timeout))
            if stock.idle:
                soon = min(soon, max(stock.pool.idle_seconds / 4, 0.01))
        self._stock_up(*self.stocks.values())
        if not self._closed and any(stock.idle for stock in self.stocks.values()):
            self._sweeping = asyncio.get_running_loop().call_later(soon, self._sweep)

    # ── ending ──

    def _bury(self, stock: Stock, instance: Instance) -> None:
        stock.closing += 1
        stock.buried += bool(instance.spoiled)
        self._burials[instance] = self._spawn(self._end(stock, instance))

    async def _end(self, stock: Stock, instance: Instance) -> None:
        """Close an instance that is not dead, and end what is left of it whether it could be closed or not."""
        try:
            if instance.housed.death() is None:
                await instance.step("close", stock.pool.reset_timeout)
        except EnvironmentFault as fault:
            stock.failed_closes += 1
            _LOG.warning("%r: %s", instance, fault)
        try:
            async with asyncio.timeout(stock.pool.reset_timeout):
                await instance.housed.end()
        except Exception as error:
            stock.failed_closes += 1
            _LOG.error("%r could not be ended: %s", instance, describe(error))
        self._burials.pop(instance, None)
        self._instances.discard(instance)
        stock.closing -= 1
        self._serve(stock)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self) -> None:
        """End every instance, whoever has it, and fail everybody who waits."""
        if self._life is not None:
            await self._close()  # where this is cut short, the end of the loop goes on with it
            await self._life.aclose()

    async def _close(self) -> None:
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for stock in self.stocks.values():
            for request in [each for each in stock.queue if each.open]:
                self._fail(request, EnvironmentFault("this manager is closed"))
        for task in self._tasks - set(self._burials.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stock in self.stocks.values():
            stock.starting = 0  # one that was cancelled before it began has not counted itself out
        for instance in self._instances:
            stock, burial = self.stock(instance.kind), self._burials.get(instance)
            if burial is None:
                stock.lent.pop(instance.number, None)
                if instance in stock.idle:
                    stock.idle.remove(instance)
                self._bury(stock, instance)
            elif burial.done():  # and yet here: it was cut short when the loop cancelled all its tasks
                self._burials[instance] = self._spawn(self._end(stock, instance))
        await asyncio.gather(*self._tasks, return_exceptions=True)
