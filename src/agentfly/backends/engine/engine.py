"""The engine: one thread that schedules and runs forward passes for as long as there are requests.

Event loops submit requests and get their tokens back; everything else happens in the thread, so the scheduler and the
cache need no locks. On a GPU the next step is prepared and launched while the previous one runs (`runner.depth`): the
host sees its tokens one step late. Weights change between two steps, when none is under way.

A step that fails costs the requests that were running; those that wait go on. After `MAX_FAILURES` failed steps in a
row, or if the thread itself fails, every request fails, and nothing can be sampled any more.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError

import numpy as np

from agentfly.backends.base import CLOSED, OnUpdate
from agentfly.backends.engine.host_cache import HostCache
from agentfly.backends.engine.model_runner import ModelRunner, WaitForOutput
from agentfly.backends.engine.request import Batch, EngineRequest, PendingRequest, Update, dispatch
from agentfly.backends.engine.scheduler import Scheduler
from agentfly.errors import AgentFlyError, BackendFault, NonFiniteError, describe
from agentfly.threads import release_helpers
from agentfly.types import Completion, FinishReason

MAX_FAILURES = 3
"""Steps that may fail one after the other before the engine gives up."""
SWITCH_INTERVAL = 2e-4
"""Seconds after which a thread that computes in Python yields to the engine's thread, which launches work on a GPU.
Python's default, 5 ms, is longer than a step takes."""
_LOG = logging.getLogger(__name__)

Commit = Callable[[], None]
"""Copies weights that were validated into the model."""


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
EXIT_SECONDS = 30.0
"""How long the exit of the interpreter waits for a step, or for the capture of CUDA graphs, to end."""


@atexit.register
def _end_threads() -> None:
    """End the threads of engines that were not closed: one that computes while the interpreter ends aborts it."""
    engines = list(_ENGINES)
    for engine in engines:
        engine.stop()
    for engine in engines:
        engine.join(EXIT_SECONDS)


class Engine:
    """Samples requests from a model."""

    def __init__(
        self, runner: ModelRunner, max_rows: int, max_tokens: int, context: int, *, host_memory: int = 0
    ) -> None:
        """Maximum number of concurrent requests, of tokens in a pass, and of tokens of a request (`context`).

        host_memory: bytes for prefixes that the runner's cache evicts.
        """
        self._runner = runner
        host_cache = HostCache(runner.kv_cache, host_memory) if host_memory and runner.shares_prefixes else None
        self._scheduler = Scheduler(
            runner.kv_cache, max_rows, max_tokens, context=context, share_prefixes=runner.shares_prefixes,
            host_cache=host_cache,
        )  # fmt: skip
        runner.attach(self._scheduler)
        self._in_flight: deque[tuple[Batch, WaitForOutput]] = deque()
        self._pending: dict[EngineRequest, PendingRequest] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._awake = threading.Event()
        self._lock = threading.Lock()
        self._ended = False
        """Whether the thread has drained its commands for the last time; guarded by the lock."""
        self._updates: deque[tuple[Commit, int, Future[None]]] = deque()
        """Weight updates that wait for running requests to end."""
        self._closed = False
        self._broken = ""
        """Why nothing can be sampled any more; empty while it can."""
        self._partial_weights = ""
        """Why the weights belong to no version; empty while they do."""
        self._failures = 0
        self.version = 0
        if runner.depth and sys.getswitchinterval() > SWITCH_INTERVAL:
            sys.setswitchinterval(SWITCH_INTERVAL)
        # torch keeps the settings of its compiler, which `compile_layers` changes, in context variables.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="agentfly-engine", daemon=True)
        self._thread.start()
        _ENGINES.add(self)

    async def sample(self, request: EngineRequest) -> Completion:
        """Run a request to its end. If it is cancelled, or its token callback raises, it leaves the batch."""
        pending = PendingRequest(request)
        self._submit(lambda: self._begin(pending))
        try:
            return await pending.future
        except BaseException:
            with contextlib.suppress(BackendFault):  # closed: nothing is left to be dropped
                self._submit(lambda: self._drop(request))
            raise

    async def update(self, prepare: Callable[[], Commit], version: int, then: OnUpdate) -> None:
        """Change the weights between two steps; every token sampled after that is of `version`.

        `prepare` validates the weights without changing anything; if it raises, that is raised here, and sampling goes
        on as before.
        """
        done: Future[None] = Future()
        self._submit(lambda: self._prepare(prepare, version, then, done))
        await asyncio.wrap_future(done)

    def stop(self) -> None:
        """Make the thread end after the current step."""
        self._closed = True
        self._awake.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended, for at most `seconds`."""
        self._thread.join(seconds)

    async def close(self) -> None:
        """Stop. Requests that are still pending fail."""
        self.stop()
        await asyncio.to_thread(self.join)

    def _submit(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._ended or not self._thread.is_alive():  # closed, or in a fork, which has no thread
                raise BackendFault(self._broken or CLOSED)
            self._commands.append(command)
        self._awake.set()

    # ── in the thread ──

    def _work(self) -> None:
        try:
            self._runner.warm_up()
            while True:
                # Cleared before the commands and `_closed` are read: what arrives in between sets it again. Cleared
                # after, the thread would sleep with a request in its queue, or forever in an engine that is closed.
                self._awake.clear()
                if self._closed:
                    break
                self._drain_commands()
                if not self._step() and not self._commands:
                    release_helpers()
                    self._awake.wait()
        except BaseException as error:
            _LOG.exception("the engine's thread ended")
            self._broken = f"the engine's thread ended with {describe(error)}"
        with self._lock:
            self._closed = self._ended = True
            self._give_up(BackendFault(self._broken or CLOSED))
            while self._commands:
                self._commands.popleft()()

    def _drain_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()
        if self._updates and self._scheduler.idle:
            while self._updates:
                self._commit(*self._updates.popleft())
            for request in self._pending:
                self._scheduler.add(request)

    def _step(self) -> bool:
        """Launch a step and take in the results of the previous one. False if there was nothing to do.

        A step that fails costs the running requests, and after several in a row the engine.
        """
        batch = self._scheduler.schedule()
        if batch is None and not self._in_flight:
            return False
        try:
            if batch is not None:
                self._in_flight.append((batch, self._runner.launch(batch)))
            ahead = self._runner.depth if batch is not None and not self._scheduler.needs_host_sampling else 0
            self._collect(ahead)
        except Exception as error:
            _LOG.exception("a step of the engine failed")
            self._failures += not isinstance(error, NonFiniteError)  # which other weights can cure
            self._fail_running(error)
            self._scheduler.reset()
            if isinstance(error, NonFiniteError):
                self._runner.kv_cache.clear_values()
            if self._failures >= MAX_FAILURES:
                self._broken = f"the engine failed {self._failures} times in a row, last with {describe(error)}"
                self._give_up(BackendFault(self._broken))
        return True

    def _collect(self, ahead: int = 0) -> None:
        """Take in the results of all steps but the last `ahead`."""
        while len(self._in_flight) > ahead:
            batch, wait = self._in_flight.popleft()
            output = wait()
            if not np.isfinite(output.logprobs).all():
                self._check_finite(batch, output.logprobs)
            finished, reported = self._scheduler.update(batch, output, self.version)
            self._failures = 0
            updates: list[tuple[PendingRequest, Update]] = [
                (self._pending[request], tokens) for request, tokens in reported
            ]
            updates += [(self._pending.pop(request), self._finish(request, reason)) for request, reason in finished]
            dispatch(updates)

    def _check_finite(self, batch: Batch, logprobs: np.ndarray) -> None:
        """Raise for the first running request whose log-probability is not finite."""
        sampling = np.flatnonzero(batch.samples)[~np.isfinite(logprobs)]
        for chunk in sampling:
            request = batch.requests[chunk]
            if request in self._scheduler.running:
                tokens = [*request.prompt.tolist(), *self._scheduler.get_output(request).tokens.tolist()]
                where = self._runner.first_nonfinite_module(tokens)
                raise NonFiniteError(
                    f"the model's logits are not finite (weights of version {self.version}); "
                    + (f"the first part with such an output is {where}" if where else "computed alone, they are")
                )

    def _finish(self, request: EngineRequest, reason: FinishReason) -> Completion:
        """Take a request out of the batch."""
        sampled = self._scheduler.get_output(request)
        self._scheduler.remove(request)
        return Completion(
            sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.versions.tolist(), reason,
            raw_logprobs=sampled.raw_logprobs.tolist(),
        )  # fmt: skip

    def _begin(self, pending: PendingRequest) -> None:
        if problem := self._broken or self._partial_weights or (CLOSED if self._closed else ""):
            dispatch([(pending, BackendFault(problem))])
        else:
            self._pending[pending.request] = pending
            if not self._updates:
                self._scheduler.add(pending.request)

    def _drop(self, request: EngineRequest) -> None:
        if self._pending.pop(request, None) is not None:
            self._scheduler.remove(request)

    def _prepare(self, prepare: Callable[[], Commit], version: int, then: OnUpdate, done: Future[None]) -> None:
        try:
            if problem := self._broken or (CLOSED if self._closed else ""):
                raise BackendFault(problem)
            commit = prepare()
        except Exception as error:
            _settle(done, error)
            return
        if then is OnUpdate.FINISH and (self._updates or not self._scheduler.idle):
            self._updates.append((commit, version, done))
            return
        self._finish_in_flight()
        if then is OnUpdate.ABORT:
            aborted = list(self._pending)
            dispatch([(self._pending.pop(request), self._finish(request, FinishReason.ABORTED)) for request in aborted])
        self._commit(commit, version, done)

    def _finish_in_flight(self) -> None:
        """Take in the results of all steps under way, before the weights change."""
        try:
            self._collect()
        except Exception as error:
            self._fail_running(error)

    def _commit(self, commit: Commit, version: int, done: Future[None]) -> None:
        self._finish_in_flight()
        self._scheduler.reset()
        self._runner.reset()
        if not done.set_running_or_notify_cancel():
            return  # cancelled before it began
        try:
            commit()
        except Exception as error:
            self._partial_weights = (
                f"the weights of version {version} came in part: {describe(error)}; update them again"
            )
            self._fail(BackendFault(self._partial_weights), list(self._pending))
            _settle(done, BackendFault(self._partial_weights))
        else:
            self.version = version
            self._partial_weights = ""
            _settle(done)

    def _fail_running(self, error: Exception) -> None:
        """Fail the requests in the batch, and forget the steps under way: their results belong to these requests."""
        self._in_flight.clear()
        fault = error if isinstance(error, AgentFlyError) else BackendFault(f"the engine failed: {describe(error)}")
        self._fail(fault, list(self._scheduler.running))

    def _fail(self, fault: Exception, requests: Iterable[EngineRequest]) -> None:
        failed = [self._pending.pop(request) for request in requests]
        for pending in failed:
            self._scheduler.remove(pending.request)
        dispatch([(pending, fault) for pending in failed])

    def _give_up(self, fault: Exception) -> None:
        """Fail everything."""
        dispatch([(pending, fault) for pending in self._pending.values()])
        self._pending.clear()
        with contextlib.suppress(Exception):  # after a failure of the scheduler itself
            self._scheduler.clear()
        while self._updates:
            _settle(self._updates.popleft()[2], fault)


def _settle(done: Future[None], error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # no task awaits it any more
        done.set_result(None) if error is None else done.set_exception(error)
