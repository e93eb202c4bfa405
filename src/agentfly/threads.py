"""Plain functions run in threads, coroutines in the loop, so that nobody's `time.sleep` stops the other chains.

The threads are daemons: a function that never returns is left behind when its caller gives up, and does not keep the
process from ending, which the standard library's executor would.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable
from typing import Any

LIMIT = 512
"""Most plain functions running at once; further ones wait their turn."""


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await an async function; run a plain one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await _POOL.run(function, args, kwargs)
    return await result if inspect.isawaitable(result) else result


class _Job:
    __slots__ = ("args", "context", "function", "future", "kwargs", "loop")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.context = contextvars.copy_context()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def run(self) -> None:
        result, error = None, None
        try:
            result = self.context.run(self.function, *self.args, **self.kwargs)
        except BaseException as raised:
            error = raised
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._deliver, result, error)

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.cancelled():
            return
        if error is None:
            self.future.set_result(result)
        else:
            # A future cannot carry StopIteration, and a thread's SystemExit must not stop the loop.
            wrap = isinstance(error, StopIteration) or not isinstance(error, Exception)
            self.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}") if wrap else error)


class _Pool:
    """Daemon threads, started when no idle one is left, up to the limit."""

    def __init__(self, limit: int) -> None:
        self._limit, self._started, self._idle = limit, 0, 0
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        job = _Job(function, args, kwargs)
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            elif self._started < self._limit:
                self._started += 1
                threading.Thread(target=self._work, name=f"agentfly-{self._started}", daemon=True).start()
        self._jobs.put(job)
        return await job.future

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if not job.future.cancelled():
                job.run()
            del job  # an idle thread must not keep the last job's arguments alive
            with self._lock:
                self._idle += 1


_POOL = _Pool(LIMIT)
