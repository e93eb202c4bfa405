"""Runs plain functions in threads and coroutines in the event loop, so that a blocking tool does not stop other chains.

The threads are daemons: a function that never returns is abandoned when its caller is cancelled. Unlike a thread of the
standard library's executor, it neither blocks the exit of the process nor occupies a slot of the pool.

Torch computations (`compute`) run in the standard library's executor. OpenMP starts helper threads for every thread
that multiplies matrices, and keeps them. As soon as a process has more of them than cores, all of them sleep between
two products instead of spinning, and two threads are hardly faster than one; so `compute` releases them afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import logging
import os
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from agentfly.errors import describe

Result = TypeVar("Result")
LIMIT = 512
"""Maximum number of plain functions that run at once; others are queued."""
BLOCKING = 0.2
"""Seconds in which a step of a coroutine is taken to block the event loop."""
_BLOCKING_NAMES: set[str] = set()
"""What has been warned of."""
_LOG = logging.getLogger(__name__)
_OMP_PAUSE_SOFT = 1  # keeps the settings of OpenMP
_PROCESS = os.getpid()


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Await an async function; run a plain one in a thread.

    A BaseException of the function is raised as RuntimeError: a SystemExit in a tool must not end the process, nor its
    own CancelledError look like a cancellation of the caller. KeyboardInterrupt and the caller's cancellation pass.
    """
    try:
        code = getattr(function, "__code__", None)  # `inspect` takes longer than a short function
        if (code is not None and code.co_flags & inspect.CO_COROUTINE) or inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await _POOL.run(function, args, kwargs)
        return await result if inspect.isawaitable(result) else result
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise
        raise RuntimeError(describe(error)) from error


def wait_for(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to completion, also if an event loop is already running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    executor = ThreadPoolExecutor(1)
    result = executor.submit(contextvars.copy_context().run, asyncio.run, coroutine)
    executor.shutdown(wait=False)  # as `with` does, but an interrupt of this thread need not wait for the coroutine
    return result.result()


class LoopTimer(Coroutine[Any, Any, Result]):
    """A coroutine that measures its longest step, during which it stops all other chains of the event loop.

    The first step of a name that takes longer than BLOCKING is logged as a warning.
    """

    __slots__ = ("_coroutine", "_name", "blocked")

    def __init__(self, coroutine: Coroutine[Any, Any, Result], name: str) -> None:
        self._coroutine = coroutine
        self._name = name
        self.blocked = 0.0
        """Seconds of the longest step, if that is more than BLOCKING."""

    def send(self, value: Any) -> Any:
        return self._time(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._time(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Result]:
        try:
            awaited = self.send(None)
        except StopIteration as finished:
            result: Result = finished.value
            return result
        return (yield from _resume(self, awaited))

    def _time(self, step: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return step(*args)
        finally:
            seconds = time.perf_counter() - started
            if seconds > max(BLOCKING, self.blocked):
                self.blocked = seconds
                if self._name not in _BLOCKING_NAMES:
                    _BLOCKING_NAMES.add(self._name)
                    _LOG.warning(
                        "%s blocked the event loop for %.2f s, and with it all other chains; write it as a plain "
                        "function, which runs in a thread, or await what takes long",
                        self._name,
                        seconds,
                    )


async def run_within(limit: asyncio.Timeout, coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Like `async with limit: return await coroutine`, but sets a timer only if the coroutine suspends.

    Most tools and resets do not: for those, a timer adds 7 to 10 % to the CPU time of a turn.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration as finished:
        result: Result = finished.value
        return result
    async with limit:
        return await _resume(coroutine, awaited)


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, Result], awaited: Any) -> Generator[Any, Any, Result]:
    """Await the rest of a coroutine that is suspended on `awaited`."""
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # a cancellation, which the coroutine may handle by awaiting something else
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(value)
    except StopIteration as finished:
        result: Result = finished.value
        return result


async def compute(function: Callable[..., Result], /, *args: Any) -> Result:
    """Run a torch computation in a thread, and release the thread's OpenMP helpers afterwards."""

    def run() -> Result:
        try:
            return function(*args)
        finally:
            release_helpers()

    return await asyncio.to_thread(run)


def find_c_function(name: str) -> Any:
    """A C function of the libraries that this process has loaded; None if none of them has it."""
    return None if sys.platform == "win32" else getattr(ctypes.CDLL(None), name, None)


def usable_cpus() -> int:
    """CPUs that this process may run on, where the system tells; else all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_helpers() -> None:
    """Release the calling thread's OpenMP helpers; the next matrix product starts new ones quickly."""
    pause = find_c_function("omp_pause_resource_all")  # None if no OpenMP is loaded, or an old one
    if pause is not None and os.getpid() == _PROCESS:  # a forked child has no helpers, and would wait for its parent's
        pause(_OMP_PAUSE_SOFT)


def trim_heap() -> None:
    """Return free memory to the system. glibc keeps what threads freed in a heap per thread, gigabytes over a run."""
    trim = find_c_function("malloc_trim")  # None in another C library
    if trim is not None:
        trim(0)


class _ThreadJob:
    __slots__ = ("abandoned", "args", "context", "function", "future", "kwargs", "loop", "running")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.running = self.abandoned = False

    def run(self) -> None:
        result = None
        error: BaseException | None = None
        try:
            result = self.context.run(self.function, *self.args, **self.kwargs)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: the result is no longer needed
            self.loop.call_soon_threadsafe(self._deliver, result, error)

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.cancelled():
            return
        if error is None:
            self.future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.future.set_exception(error)
        else:  # a future cannot hold StopIteration, and the loop would handle other BaseExceptions itself
            self.future.set_exception(RuntimeError(describe(error)))


class _ThreadPool:
    """Daemon threads, started on demand up to the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._threads = 0
        self._idle = 0
        self._jobs: queue.SimpleQueue[_ThreadJob] = queue.SimpleQueue()
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        job = _ThreadJob(function, args, kwargs)
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            elif self._threads < self._limit:
                self._start_thread()
        self._jobs.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            with self._lock:
                if job.running:  # abandon the thread: it ends with its function and no longer counts
                    job.abandoned = True
                    self._threads -= 1
                    if not self._jobs.empty():
                        self._start_thread()
            raise

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="agentfly", daemon=True).start()
        self._threads += 1

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                job.running = not job.future.cancelled()
            if job.running:
                job.run()
            with self._lock:
                job.running = False
                if job.abandoned:
                    return
                self._idle += 1
            del job  # an idle thread must not keep the last job's arguments alive


_POOL = _ThreadPool(LIMIT)
