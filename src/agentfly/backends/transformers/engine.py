"""The engine: one thread that runs the model, step after step, for as long as there is something to do.

The event loop hands jobs over and gets their tokens back; everything else happens in the thread, so the scheduler and
the arena need no locks. Weights change between two steps, never within one.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from agentfly.backends.transformers.job import Job
from agentfly.backends.transformers.runner import Runner
from agentfly.backends.transformers.scheduler import Chunk, Scheduler
from agentfly.errors import AgentFlyError, BackendFault, ModelBroken, describe
from agentfly.types import Completion, Finish

FAULTS = 3
"""Steps that may fail one after the other before the engine gives up."""
_LOG = logging.getLogger(__name__)


class OnUpdate(enum.Enum):
    """What becomes of turns that are being sampled when the weights change."""

    CONTINUE = "continue"
    """They go on with the weights that came, on a past that is computed anew with them."""
    FINISH = "finish"
    """The weights change when they have ended; turns that were asked for meanwhile wait."""
    ABORT = "abort"
    """They end as they are."""


class Ticket:
    """A job, and who waits for it in which event loop."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Completion] = self.loop.create_future()


News = Completion | Exception | list[int]
"""How a turn ended, or what was sampled of it since the last time."""


class Engine:
    """A model at work."""

    def __init__(self, runner: Runner, rows: int, tokens: int) -> None:
        """`rows`: most turns sampled at once; `tokens`: most tokens in one forward pass."""
        self._runner = runner
        self._scheduler = Scheduler(runner.arena, rows, tokens, runner.reuses)
        self._tickets: dict[Job, Ticket] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._awake = threading.Event()
        self._updates: deque[tuple[Callable[[], None], Future[None]]] = deque()
        """Changes of the weights that wait for the turns under way to end."""
        self._closed = False
        self._broken = ""
        """Why nothing can be sampled any more; empty while it can."""
        self._faults = 0
        self.version = 0
        self._thread = threading.Thread(target=self._work, name="agentfly-engine", daemon=True)
        self._thread.start()

    async def sample(self, job: Job) -> Completion:
        """Run a job to its end; a cancelled one leaves the batch."""
        ticket = Ticket(job)
        self._order(lambda: self._begin(ticket))
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._order(lambda: self._drop(job))
            raise

    async def update(self, change: Callable[[], None], version: int, then: OnUpdate) -> None:
        """Change the weights between two steps; every token drawn after that is of `version`."""
        done: Future[None] = Future()
        self._order(lambda: self._change(change, version, then, done))
        await asyncio.wrap_future(done)

    async def close(self) -> None:
        """Stop. Whoever still waits is told."""
        if not self._closed:
            self._closed = True
            self._awake.set()
            await asyncio.to_thread(self._thread.join)

    # ── in the thread ──

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._awake.set()

    def _work(self) -> None:
        while not self._closed:
            self._awake.clear()
            while self._orders:
                self._orders.popleft()()
            if self._updates and not self._tickets:
                change, done = self._updates.popleft()
                _settle(done, change)
                self._resume()
            chunks = self._scheduler.step()
            if chunks:
                self._guarded(chunks)
            elif not self._orders:
                self._awake.wait()
        while self._orders:
            self._orders.popleft()()
        self._fail(BackendFault("the engine is closed"))

    def _guarded(self, chunks: Sequence[Chunk]) -> None:
        """A step that fails costs the turns under way, and after several in a row the engine."""
        try:
            self._step(chunks)
            self._faults = 0
        except Exception as error:
            _LOG.exception("a step of the engine failed")
            self._faults += 1
            fault = error if isinstance(error, AgentFlyError) else BackendFault(f"the engine failed: {describe(error)}")
            if self._faults >= FAULTS:
                self._broken = f"the engine failed {self._faults} times in a row, last with {describe(error)}"
            self._fail(fault)
            self._scheduler.forget()

    def _step(self, chunks: Sequence[Chunk]) -> None:
        fresh: list[tuple[Job, int]] = []
        for chunk, drawn in zip(chunks, self._runner.run(chunks), strict=True):
            job = chunk.job
            if not all(math.isfinite(logprob) for _, logprob, _ in drawn):
                raise self._broken_model(job)
            job.cached += chunk.count
            for count, (token, logprob, own) in enumerate(drawn, 1):
                job.append(token, logprob, own, self.version)
                job.cached = len(job.tokens) - 1
                if job.finish is not None or count == len(drawn):
                    fresh.append((job, count))
                    break
        for job, _ in fresh:
            if job.finish is not None:
                self._scheduler.remove(job)
        self._deliver(fresh)

    def _broken_model(self, job: Job) -> ModelBroken:
        where = self._runner.culprit(job.tokens)
        return ModelBroken(
            f"the model's logits are not finite (weights of version {self.version}); "
            + (f"the first part with such an output is {where}" if where else "computed alone, they are")
        )

    def _begin(self, ticket: Ticket) -> None:
        if self._broken or self._closed:
            _tell([(ticket, BackendFault(self._broken or "the engine is closed"))])
        else:
            self._tickets[ticket.job] = ticket
            if not self._updates:
                self._scheduler.add(ticket.job)

    def _drop(self, job: Job) -> None:
        if self._tickets.pop(job, None) is not None:
            self._scheduler.remove(job)

    def _change(self, change: Callable[[], None], version: int, then: OnUpdate, done: Future[None]) -> None:
        def changed() -> None:
            change()
            self.version = version
            self._scheduler.forget()

        if then is OnUpdate.FINISH and self._tickets:
            self._updates.append((changed, done))
            return
        if then is OnUpdate.ABORT:
            self._abort()
        _settle(done, changed)

    def _abort(self) -> None:
        for job in list(self._tickets):
            job.finish = Finish.ABORTED
            self._scheduler.remove(job)
        self._deliver([(job, 0) for job in self._tickets])

    def _resume(self) -> None:
        for job in self._tickets:
            self._scheduler.add(job)

    def _fail(self, fault: Exception) -> None:
        tickets, self._tickets = self._tickets, {}
        for job in tickets:
            self._scheduler.remove(job)
        _tell([(ticket, fault) for ticket in tickets.values()])
        while self._updates:
            self._updates.popleft()[1].set_exception(fault)

    def _deliver(self, jobs: Sequence[tuple[Job, int]]) -> None:
        """Hand out the new tokens of each job: one call into each event loop a step, however many jobs there are."""
        news: list[tuple[Ticket, News]] = []
        for job, count in jobs:
            ticket = self._tickets[job]
            if job.request.on_tokens is not None and count:
                news.append((ticket, job.tokens[-count:]))
            if job.finish is not None:
                del self._tickets[job]
                news.append((ticket, job.completion))
        _tell(news)


def _settle(done: Future[None], change: Callable[[], None]) -> None:
    try:
        change()
    except Exception as error:
        done.set_exception(error)
    else:
        done.set_result(None)


def _tell(news: Sequence[tuple[Ticket, News]]) -> None:
    loops = {ticket.loop for ticket, _ in news}
    for loop in loops:
        mine = [(ticket, what) for ticket, what in news if ticket.loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_hand_out, mine)


def _hand_out(news: Sequence[tuple[Ticket, News]]) -> None:
    for ticket, what in news:
        if isinstance(what, list):
            watch = ticket.job.request.on_tokens
            if watch is not None and not ticket.future.done():
                watch(what)
        elif not ticket.future.done():
            if isinstance(what, Exception):
                ticket.future.set_exception(what)
            else:
                ticket.future.set_result(what)
