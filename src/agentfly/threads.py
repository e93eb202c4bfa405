"""Plain functions run in threads, coroutines in the loop, so that nobody's `time.sleep` stops the other chains.

The threads are daemons: a function that never returns is left behind when its caller gives up. It neither keeps the
process from ending, which the standard library's executor would, nor takes up a place in the pool.

What computes with torch (`compute`) runs in a thread of the standard library's executor. OpenMP gives every thread that
multiplies matrices helpers of its own, which stay. As soon as a process has more of them than cores, all of them sleep
between any two products instead of waiting ready, and two threads do hardly more than one: so whoever has computed lets
its helpers go.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import inspect
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from agentfly.errors import describe

Result = TypeVar("Result")
LIMIT = 512
"""Most plain functions running at once; further ones wait their turn."""
_SOFT = 1  # what was set stays set
_PROCESS = os.getpid()


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Await an async function; run a plain one in a thread.

    What it raises arrives as an Exception, whatever it is: a SystemExit in a tool must not end the process, nor a
    CancelledError of its own making pass for a cancellation of the caller. That, and Ctrl-C, come through as they are.
    """
    try:
        if inspect.iscoroutinefunction(function):
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


async def compute(function: Callable[..., Result], /, *args: Any) -> Result:
    """Run what computes in a thread, and let that thread's helpers go after it."""

    def computed() -> Result:
        try:
            return function(*args)
        finally:
            release_helpers()

    return await asyncio.to_thread(computed)


def release_helpers() -> None:
    """Let the calling thread's helpers of OpenMP go; the next product that wants some starts them in a moment."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # where an OpenMP is loaded that has it
    if pause is not None and os.getpid() == _PROCESS:  # a fork has no helpers, and would wait for those of its parent
        pause(_SOFT)


class _Job:
    __slots__ = ("abandoned", "args", "context", "function", "future", "kwargs", "loop", "running")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.running = self.abandoned = False

    def run(self) -> None:
        result, error = None, None
        try:
            result = self.context.run(self.function, *self.args, **self.kwargs)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._deliver, result, error)

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.cancelled():
            return
        if error is None:
            self.future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.future.set_exception(error)
        else:  # what a future cannot carry, or the loop would take for its own
            self.future.set_exception(RuntimeError(describe(error)))


class _Pool:
    """Daemon threads, started when no idle one is left, up to the limit."""

    def __init__(self, limit: int) -> None:
        self._limit, self._threads, self._idle = limit, 0, 0
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        job = _Job(function, args, kwargs)
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            elif self._threads < self._limit:
                self._start_thread()
        self._jobs.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    def _give_up(self, job: _Job) -> None:
        """Let another thread take the place of one whose function nobody waits for."""
        with self._lock:
            if job.running:
                job.abandoned = True
                self._threads -= 1
                if not self._jobs.empty():
                    self._start_thread()

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


_POOL = _Pool(LIMIT)
