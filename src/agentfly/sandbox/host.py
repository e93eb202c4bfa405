"""SessionHost: the host side of one session. Creates its processes, terminates them, reports how they ended.

Deadline: ends a call that takes too long.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable

from agentfly.sandbox import channel as channels
from agentfly.sandbox.base import Limits

GRACE = 1.0
"""Seconds between an interrupt, a restart of the interpreter, and giving the session up."""


class SessionHost(ABC):
    """Owns the processes, files and channel of one session, and releases all of them on close."""

    channel: channels.SessionChannel
    """To the session init."""
    folder: str
    """Working folder, as the session sees it."""

    def __init__(self, limits: Limits, on_closed: Callable[[SessionHost], object]) -> None:
        self.limits = limits
        self._on_closed = on_closed
        self._closing: asyncio.Task[int | None] | None = None

    @abstractmethod
    async def open(self) -> None:
        """Create the session; on return its session init is ready for calls."""

    @abstractmethod
    async def _release(self) -> int | None:
        """Kill all processes and release all resources.

        Returns the wait status of the session's first process, or None if unknown.
        """

    @abstractmethod
    def memory_kills(self) -> int:
        """Number of processes killed by the kernel for memory, as far as the host can see it."""

    @abstractmethod
    async def memory(self) -> int | None:
        """Bytes used by the session. None if they are not accounted."""

    @abstractmethod
    async def pause(self, paused: bool) -> None:
        """Stop using CPU time (True), or continue (False)."""

    def start_closing(self) -> asyncio.Task[int | None]:
        """Start to release everything, once, however often this is called. Returns the task that does it."""
        if self._closing is None or self._closing.cancelled():  # a loop that shuts down cancels all tasks
            self._closing = asyncio.get_running_loop().create_task(self._release())
            self._closing.add_done_callback(self._after_closing)
        return self._closing

    async def close(self) -> int | None:
        """Release everything and wait for it. Returns the wait status of the first process, or None if unknown."""
        while True:
            closing = self.start_closing()
            try:
                return await asyncio.shield(closing)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not closing.cancelled() or (task is not None and task.cancelling()):
                    raise  # the caller was cancelled, not the closing task

    def _after_closing(self, closing: asyncio.Task[int | None]) -> None:
        if not closing.cancelled():
            self._on_closed(self)
            closing.exception()  # marks it as retrieved: not every caller of start_closing awaits the task

    async def _wait_until_ready(self) -> None:
        """Let the session init continue after its `hello`, now that its limits are in place."""
        await self.channel.send(channels.QUESTION, json.dumps({"do": "start"}).encode())
        await self._expect("ready")

    async def _expect(self, key: str) -> None:
        """Wait for the message `{key: 1}` of the session init; raises ProtocolViolation on any other."""
        _, payload = await self.channel.receive(channels.ANSWER)
        form = {key: channels.is_count, "failed": channels.is_text}
        message = channels.parse(payload, form, optional=frozenset(form))
        if key not in message:
            raise channels.ProtocolViolation(message.get("failed", "an unexpected message")[:500])


class Deadline:
    """Ends a call that takes too long: interrupts it, then restarts the interpreter, then gives the session up.

    All calls of a session share one timer, which is set again only when it fires: a timer per call would cost as much
    as sending the call.
    """

    def __init__(self) -> None:
        self._host: SessionHost | None = None
        """The session host of the running call; None between two calls."""
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        """When to take the next step, in the time of the event loop."""
        self._steps: list[str] = []
        self.expired = False
        """Whether the time limit of the last call passed before its answer came."""

    def start(self, host: SessionHost, seconds: float) -> None:
        """Start a call with this time limit."""
        self._host = host
        self._steps = ["interrupt", "restart", "expire"]
        self.expired = False
        self._set(max(seconds, 0.0))

    def stop(self) -> None:
        """End the call."""
        self._host = None

    def close(self) -> None:
        """Cancel the timer, with which the event loop would keep this session alive."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _set(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._at = loop.time() + seconds
        if self._timer is None or self._timer.when() > self._at:
            self.close()
            self._timer = loop.call_at(self._at, self._fire)

    def _fire(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        if self._host is None:
            return
        if loop.time() < self._at:  # it was set for an earlier call
            self._timer = loop.call_at(self._at, self._fire)
            return
        self.expired = True
        step = self._steps.pop(0)
        if step == "expire":
            self._host.channel.expire()
        else:
            request = {"do": step, "why": "killed"}
            self._host.channel.send_now(channels.QUESTION, json.dumps(request).encode())
            self._set(GRACE)
