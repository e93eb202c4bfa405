"""The engine: one thread that runs the model, step after step, for as long as there is something to do.

The event loops hand jobs over and get their tokens back; everything else happens in the thread, so the scheduler and
the arena need no locks. Weights change between two steps, never within one.

A step that fails costs the turns that were in the batch; those that wait go on. After `FAULTS` of them in a row, or
when the thread itself comes to grief, everybody is told, and nothing can be sampled any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError

from agentfly.backends.base import CLOSED, OnUpdate
from agentfly.backends.engine.model_runner import ModelRunner
from agentfly.backends.engine.pending import PendingRequest, Update, dispatch
from agentfly.backends.engine.request import EngineRequest
from agentfly.backends.engine.scheduler import ScheduledChunk, Scheduler
from agentfly.errors import AgentFlyError, BackendFault, NonFiniteError, describe
from agentfly.threads import release_helpers
from agentfly.types import Completion, FinishReason

FAULTS = 3
"""Steps that may fail one after the other before the engine gives up."""
_LOG = logging.getLogger(__name__)

Commit = Callable[[], None]
"""Puts weights that were found to fit into the model."""


class Engine:
    """A model at work."""

    def __init__(self, runner: ModelRunner, rows: int, tokens: int) -> None:
        """`rows`: most turns sampled at once; `tokens`: most tokens in one forward pass."""
        self._runner = runner
        self._scheduler = Scheduler(runner.arena, rows, tokens, runner.reuses)
        self._tickets: dict[EngineRequest, PendingRequest] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._awake = threading.Event()
        self._ordering = threading.Lock()
        self._ended = False
        """Whether the thread took its last look at the orders; read and written under the lock."""
        self._updates: deque[tuple[Commit, int, Future[None]]] = deque()
        """Changes of the weights that wait for the turns under way to end."""
        self._closed = False
        self._broken = ""
        """Why nothing can be sampled any more; empty while it can."""
        self._torn = ""
        """Why the weights are those of no version; empty while they are of one."""
        self._faults = 0
        self.version = 0
        self._thread = threading.Thread(target=self._work, name="agentfly-engine", daemon=True)
        self._thread.start()

    async def sample(self, job: EngineRequest) -> Completion:
        """Run a job to its end; a cancelled one leaves the batch, and so does one whose watcher raises."""
        ticket = PendingRequest(job)
        self._submit(lambda: self._begin(ticket))
        try:
            return await ticket.future
        except BaseException:
            with contextlib.suppress(BackendFault):  # it is closed: nothing is left to be dropped
                self._submit(lambda: self._drop(job))
            raise

    async def update(self, prepare: Callable[[], Commit], version: int, then: OnUpdate) -> None:
        """Change the weights between two steps; every token drawn after that is of `version`.

        `prepare` looks at the weights and touches nothing; what it raises is raised here, and all goes on as before.
        """
        done: Future[None] = Future()
        self._submit(lambda: self._prepare(prepare, version, then, done))
        await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Have the thread end after the step it is in."""
        self._closed = True
        self._awake.set()

    async def close(self) -> None:
        """Stop. Whoever still waits is told."""
        self.stop()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, order: Callable[[], None]) -> None:
        with self._ordering:
            if self._ended or not self._thread.is_alive():  # closed, or in a fork, which has no thread
                raise BackendFault(self._broken or CLOSED)
            self._orders.append(order)
        self._awake.set()

    # ── in the thread ──

    def _work(self) -> None:
        try:
            while not self._closed:
                self._awake.clear()
                self._drain_commands()
                chunks = self._scheduler.step()
                if chunks:
                    self._run_guarded(chunks)
                elif not self._orders:
                    release_helpers()
                    self._awake.wait()
        except BaseException as error:
            _LOG.exception("the engine's thread ended")
            self._broken = f"the engine's thread ended with {describe(error)}"
        with self._ordering:
            self._closed = self._ended = True
            self._give_up(BackendFault(self._broken or CLOSED))
            while self._orders:
                self._orders.popleft()()

    def _drain_commands(self) -> None:
        while self._orders:
            self._orders.popleft()()
        if self._updates and self._scheduler.idle:
            while self._updates:
                self._commit(*self._updates.popleft())
            for job in self._tickets:
                self._scheduler.add(job)

    def _run_guarded(self, chunks: Sequence[ScheduledChunk]) -> None:
        """A step that fails costs the turns in the batch, and after several in a row the engine."""
        try:
            self._step(chunks)
            self._faults = 0
        except Exception as error:
            _LOG.exception("a step of the engine failed")
            self._faults += not isinstance(error, NonFiniteError)  # which better weights can cure
            fault = error if isinstance(error, AgentFlyError) else BackendFault(f"the engine failed: {describe(error)}")
            self._fail(fault, list(self._scheduler.running))
            self._scheduler.forget()
            if isinstance(error, NonFiniteError):
                self._runner.arena.wipe()
            if self._faults >= FAULTS:
                self._broken = f"the engine failed {self._faults} times in a row, last with {describe(error)}"
                self._give_up(BackendFault(self._broken))

    def _step(self, chunks: Sequence[ScheduledChunk]) -> None:
        fresh: list[tuple[EngineRequest, int]] = []
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
        self._deliver(fresh)

    def _broken_model(self, job: EngineRequest) -> NonFiniteError:
        where = self._runner.first_nonfinite_module(job.tokens)
        return NonFiniteError(
            f"the model's logits are not finite (weights of version {self.version}); "
            + (f"the first part with such an output is {where}" if where else "computed alone, they are")
        )

    def _begin(self, ticket: PendingRequest) -> None:
        if why := self._broken or self._torn or (CLOSED if self._closed else ""):
            dispatch([(ticket, BackendFault(why))])
        else:
            self._tickets[ticket.job] = ticket
            if not self._updates:
                self._scheduler.add(ticket.job)

    def _drop(self, job: EngineRequest) -> None:
        if self._tickets.pop(job, None) is not None:
            self._scheduler.remove(job)

    def _prepare(self, prepare: Callable[[], Commit], version: int, then: OnUpdate, done: Future[None]) -> None:
        try:
            if why := self._broken or (CLOSED if self._closed else ""):
                raise BackendFault(why)
            commit = prepare()
        except Exception as error:
            _settle(done, error)
            return
        if then is OnUpdate.FINISH and (self._updates or not self._scheduler.idle):
            self._updates.append((commit, version, done))
            return
        if then is OnUpdate.ABORT:
            self._abort()
        self._commit(commit, version, done)

    def _commit(self, commit: Commit, version: int, done: Future[None]) -> None:
        self._scheduler.forget()
        self._runner.forget()
        if not done.set_running_or_notify_cancel():
            return  # whoever wanted it gave up before it began
        try:
            commit()
        except Exception as error:
            self._torn = f"the weights of version {version} came in part: {describe(error)}; update them again"
            self._fail(BackendFault(self._torn), list(self._tickets))
            _settle(done, BackendFault(self._torn))
        else:
            self.version, self._torn = version, ""
            _settle(done)

    def _abort(self) -> None:
        for job in self._tickets:
            job.finish = FinishReason.ABORTED
        self._deliver([(job, 0) for job in self._tickets])

    def _fail(self, fault: Exception, jobs: Iterable[EngineRequest]) -> None:
        tickets = [self._tickets.pop(job) for job in jobs]
        for ticket in tickets:
            self._scheduler.remove(ticket.job)
        dispatch([(ticket, fault) for ticket in tickets])

    def _give_up(self, fault: Exception) -> None:
        """Tell everybody; what is in the scheduler is of no matter any more."""
        dispatch([(ticket, fault) for ticket in self._tickets.values()])
        self._tickets.clear()
        self._scheduler.clear()
        while self._updates:
            _settle(self._updates.popleft()[2], fault)

    def _deliver(self, jobs: Sequence[tuple[EngineRequest, int]]) -> None:
        """Hand out the fresh tokens of each job: one call into each event loop a step, however many jobs there are."""
        news: list[tuple[PendingRequest, Update]] = []
        for job, count in jobs:
            ticket = self._tickets[job]
            if job.request.on_tokens is not None and count:
                news.append((ticket, job.tokens[-count:]))
            if job.finish is not None:
                del self._tickets[job]
                self._scheduler.remove(job)
                news.append((ticket, job.completion))
        dispatch(news)


def _settle(done: Future[None], error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits any more
        done.set_result(None) if error is None else done.set_exception(error)
