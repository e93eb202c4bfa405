"""Framed requests and answers over a socket: the host's end and the worker's end.

The payload of each frame begins with the number of the request (8 bytes) that it starts, cancels or answers.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from agentfly.errors import EnvironmentFault
from agentfly.resources.rpc import codec
from agentfly.resources.rpc.server import RpcServer
from agentfly.sandbox.inside.frames import ANSWER, CANCEL, NO_LIMIT, QUESTION, BrokenFrame, FrameBuffer, pack

_NUMBER = struct.Struct(">Q")


class FrameProtocol(asyncio.Protocol):
    """Splits a byte stream into frames. One that `limits` (kind → maximum payload) forbids closes the connection."""

    limits: Mapping[bytes, int]

    def __init__(self) -> None:
        self._buffer = FrameBuffer(self.limits)
        self._transport: asyncio.Transport | None = None
        self.broken = ""
        """The protocol error that closed the connection. Empty if the other end disconnected."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._transport = None
        self.on_close()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio. Passes every complete frame to `on_frame`."""
        self._buffer.feed(data)
        try:
            while (frame := self._buffer.next()) is not None:
                kind, payload = frame
                if len(payload) < _NUMBER.size:
                    raise BrokenFrame("a frame without a number")
                self.on_frame(kind, _NUMBER.unpack_from(payload)[0], payload[_NUMBER.size :])
        except BrokenFrame as error:
            self.broken = f"it sent {error}"
            self.close()

    def send(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        """Send a frame; does nothing on a closed connection."""
        if self._transport is not None:
            self._transport.write(pack(kind, payload, prefix=_NUMBER.pack(number)))

    def close(self) -> None:
        """Abort the connection."""
        if self._transport is not None:
            self._transport.abort()

    def on_frame(self, kind: bytes, number: int, payload: bytes) -> None:
        """Handle a frame."""
        raise NotImplementedError

    def on_close(self) -> None:
        """Handle the end of the connection."""
        raise NotImplementedError


class RpcConnection(FrameProtocol):
    """The host's end: a transport for a proxy."""

    limits = {ANSWER: codec.LIMIT + (2 << 20)}  # noqa: RUF012  (the value, and the mirrored attributes)

    def __init__(self, exit_reason: Callable[[], Awaitable[str]]) -> None:
        super().__init__()
        self._exit_reason = exit_reason
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes | None]] = {}

    @classmethod
    async def open(cls, connected: socket.socket, exit_reason: Callable[[], Awaitable[str]]) -> RpcConnection:
        """Wrap a connected socket. After the connection is lost, `exit_reason` returns how the other end ended."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(lambda: cls(exit_reason), sock=connected)
        return connection

    async def ask(self, request: bytes) -> bytes:
        number = next(self._numbers)
        answer: bytes | None = None
        if self._transport is not None:
            waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
            self.send(QUESTION, number, request)
            try:
                answer = await waiting
            except asyncio.CancelledError:
                self.send(CANCEL, number)
                raise
            finally:
                del self._waiting[number]
        if answer is None:  # what it sent explains more than how it ended, which is then our own kill
            raise EnvironmentFault(self.broken or await self._exit_reason())
        return answer

    def on_frame(self, kind: bytes, number: int, payload: bytes) -> None:
        """Complete the request that an answer belongs to; ignore answers to cancelled requests."""
        waiting = self._waiting.get(number)
        if kind == ANSWER and waiting is not None and not waiting.done():
            waiting.set_result(payload)

    def on_close(self) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)


class RpcWorker(FrameProtocol):
    """The worker's end: runs every request in its own task and sends the answers."""

    limits = {QUESTION: NO_LIMIT, CANCEL: _NUMBER.size}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self._server = RpcServer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.closed = asyncio.Event()

    def on_frame(self, kind: bytes, number: int, payload: bytes) -> None:
        if kind == QUESTION:
            task = self._tasks[number] = asyncio.create_task(self._answer(number, payload))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif kind == CANCEL and number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, request: bytes) -> None:
        self.send(ANSWER, number, await self._server.answer(request))

    def on_close(self) -> None:
        self.closed.set()


async def serve(connected: socket.socket) -> None:
    """Answer requests on a connected socket until it closes."""
    _, worker = await asyncio.get_running_loop().create_unix_connection(RpcWorker, sock=connected)
    await worker.closed.wait()
