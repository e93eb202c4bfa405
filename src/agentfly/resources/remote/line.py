"""Requests and answers over a socket. A frame is four bytes of length, eight of the request's number, one of kind."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import cast

from agentfly.errors import EnvironmentFault
from agentfly.resources.remote import plain

REQUEST, CANCEL, ANSWER = b"R", b"C", b"A"
_HEAD = struct.Struct(">IQc")
_MOST_ANSWER = plain.LIMIT + (2 << 20)
"""Most bytes of an answer: the value, and the attributes beside it."""


class Frames(asyncio.Protocol):
    """Cuts a stream of bytes into frames. One that is longer than `most` ends the connection."""

    most: int

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.broken = ""
        """Why no frame will come any more, if it is not that the other end is gone."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, _: Exception | None) -> None:
        """End: the other end is gone, or this one was closed."""
        self._transport = None
        self.lost()

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            length, number, kind = _HEAD.unpack_from(self._buffer)
            if length > self.most:
                self.broken = f"it sent a frame of {length} bytes; at most {self.most} are taken"
                self.close()
                return
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            self.taken(kind, number, payload)

    def send(self, kind: bytes, number: int, payload: bytes = b"") -> None:
        """Send a frame; nothing happens where nobody is left to read it."""
        if self._transport is not None:
            self._transport.write(_HEAD.pack(len(payload), number, kind) + payload)

    def close(self) -> None:
        """Let go of the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def taken(self, kind: bytes, number: int, payload: bytes) -> None:
        """A frame came."""
        raise NotImplementedError

    def lost(self) -> None:
        """No frame will come any more."""
        raise NotImplementedError


class Line(Frames):
    """The host's end: a transport for a stand-in."""

    most = _MOST_ANSWER

    def __init__(self, why: Callable[[], Awaitable[str]]) -> None:
        super().__init__()
        self._why, self._numbers = why, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes | None]] = {}

    @classmethod
    async def over(cls, end: socket.socket, why: Callable[[], Awaitable[str]]) -> Line:
        """A line over a connected socket; `why` says, once it is broken, what became of the other end."""
        _, line = await asyncio.get_running_loop().create_unix_connection(lambda: cls(why), sock=end)
        return line

    async def ask(self, request: bytes) -> bytes:
        """The answer to a request; a cancellation is passed on."""
        number, waiting = next(self._numbers), asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise EnvironmentFault(self.broken or await self._why())
        self._waiting[number] = waiting
        self.send(REQUEST, number, request)
        try:
            answer: bytes | None = await waiting
        except asyncio.CancelledError:
            self.send(CANCEL, number)
            raise
        finally:
            del self._waiting[number]
        if answer is None:
            raise EnvironmentFault(self.broken or await self._why())
        return answer

    def taken(self, kind: bytes, number: int, payload: bytes) -> None:
        """Hand an answer to who waits for it; nobody does where it was cancelled."""
        waiting = self._waiting.get(number)
        if kind == ANSWER and waiting is not None and not waiting.done():
            waiting.set_result(payload)

    def lost(self) -> None:
        """Wake everybody who waits."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)
