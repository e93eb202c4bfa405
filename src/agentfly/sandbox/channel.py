"""SessionChannel: the host's end of a session's socket. Every received byte is untrusted until checked.

Kind and length of a frame are checked before its payload is read, each call has a byte budget, and JSON must have
exactly the expected form. Any violation ends the session.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.sandbox.inside import frames
from agentfly.sandbox.inside.frames import ANSWER, DATA, OUTPUT, QUESTION, REPLY

__all__ = ["ANSWER", "DATA", "OUTPUT", "QUESTION", "REPLY"]
_MAX_LENGTH = {ANSWER: 8 << 20, OUTPUT: 4 << 20, REPLY: 24 << 20, DATA: 1 << 20}
_CHUNK = 1 << 16  # bytes read at once. The memory for more would be mapped and unmapped for every message
_FRAME_COST = 64  # bytes charged per frame, so that empty frames use up the budget too
_PNG = b"\x89PNG\r\n\x1a\n"
_CREDENTIALS = struct.Struct("3i")

Form = Mapping[str, Callable[[Any], bool]]
"""Expected keys of a JSON object, each with a predicate for its value."""


class ChannelError(Exception):
    """The session can no longer be reached."""


class ChannelClosed(ChannelError):
    """The peer closed the channel."""


class ProtocolViolation(ChannelError):
    """The peer sent a message that breaks the protocol."""


class ChannelFlooded(ChannelError):
    """The peer sent more than a call may."""


class ChannelTimeout(ChannelError):
    """No message arrived in time."""


class SessionChannel:
    """Sends and receives the frames of one session."""

    def __init__(self, end: socket.socket, unwrap: Callable[[bytes], bytes] = bytes) -> None:
        end.setblocking(False)
        self._socket = end
        self._unwrap = unwrap
        """Removes the framing of the transport, such as the stream multiplexing of a container engine."""
        self.gone = False
        """Whether a call found the peer gone."""
        self._buffer = frames.FrameBuffer(_MAX_LENGTH)
        self._budget = 0
        self._num_received = 0
        self._waiting: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that watches the socket. None while it is not watched."""
        self._closed: ChannelClosed | None = None
        """How the channel ended; raised after the frames that were received before."""
        self._expired = False

    def hung_up(self) -> bool:
        """Whether the peer is gone, as far as this is known without a call. Consumes no data."""
        if self._expired:
            return True
        try:
            # A peek: a byte read here would be missing from the next frame.
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the socket and wake the waiting task."""
        self.expire()
        self._stop_reading()
        self._socket.close()

    def expire(self) -> None:
        """Make the waiting task, and every later one, raise ChannelTimeout."""
        self._expired = True
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)

    def allow(self, budget: int) -> None:
        """Set the number of bytes the peer may still send."""
        self._budget = budget

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Send a frame."""
        data = frames.pack(kind, payload)
        sent = 0
        while sent < len(data):
            try:
                sent += self._socket.send(memoryview(data)[sent:] if sent else data)
            except BlockingIOError:
                await self._wait(writing=True)
            except OSError as error:
                self.gone = True
                raise ChannelClosed(str(error)) from error

    def send_now(self, kind: bytes, payload: bytes) -> None:
        """Send a short frame without waiting. If the buffer is full the peer does not read; the deadline handles it."""
        with contextlib.suppress(OSError):
            self._socket.send(frames.pack(kind, payload))

    async def receive(self, *kinds: bytes) -> tuple[bytes, bytes]:
        """Return kind and payload of the next frame, which must be of one of these kinds."""
        try:
            while self._expired or (frame := self._buffer.next(kinds, self._budget)) is None:
                if self._expired:
                    raise ChannelTimeout
                if self._closed:
                    self.gone = True
                    raise self._closed
                if self._loop is None:
                    self._loop = asyncio.get_running_loop()
                    self._loop.add_reader(self._socket.fileno(), self._read)
                self._waiting = self._loop.create_future()
                try:
                    await self._waiting
                finally:
                    self._waiting = None
        except frames.FrameTooLong as error:
            raise ChannelFlooded(str(error)) from error
        except frames.BrokenFrame as error:
            raise ProtocolViolation(str(error)) from error
        # A budget over the whole call: each frame may be legal while millions of them fill the memory of this process.
        self._budget -= len(frame[1]) + _FRAME_COST
        self._num_received += 1
        if self._num_received % 64 == 0:  # let other tasks run even while frames arrive without a pause
            await asyncio.sleep(0)
        return frame

    async def receive_credentials(self) -> int | None:
        """Wait for the first bytes. Returns the pid of their sender if the socket has SO_PASSCRED, else None."""
        await self._wait()
        try:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("closed before its first message")
        self._buffer.feed(data)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                return int(_CREDENTIALS.unpack(content)[0])
        return None

    def _read(self) -> None:
        """Append what has arrived to the buffer and wake the waiting task. The event loop calls this."""
        if self._waiting is None or self._waiting.done():
            # Nothing is expected: do not watch until it is, so that a peer cannot fill the memory of this process.
            self._stop_reading()
            return
        try:
            data = self._socket.recv(_CHUNK)
            self._buffer.feed(self._unwrap(data))
            if not data:
                self._closed = ChannelClosed("the other end is gone")
        except BlockingIOError:
            return
        except OSError as error:
            self._closed = ChannelClosed(str(error))
        self._waiting.set_result(None)

    def _stop_reading(self) -> None:
        """Stop watching the socket."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None

    async def _wait(self, writing: bool = False) -> None:
        """Wait until the socket is ready, without reading: a peer that sends meanwhile would fill the buffer."""
        self._stop_reading()
        loop = asyncio.get_running_loop()
        waiting = self._waiting = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        fd = self._socket.fileno()
        add(fd, lambda: waiting.set_result(None) if not waiting.done() else None)
        try:
            await waiting
        finally:
            remove(fd)
            self._waiting = None
        if self._expired:
            raise ChannelTimeout


# Not pydantic: its strings reject lone surrogates, which user code may print and a session must survive.
def parse(payload: bytes, form: Form, optional: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Parse a JSON object of exactly this form: all required keys, no other keys, every value accepted."""
    try:
        value = json.loads(payload.decode())  # of bytes, json would also guess UTF-16 and UTF-32
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"invalid JSON: {type(error).__name__}") from error
    if not isinstance(value, dict) or not value.keys() <= form.keys() or not form.keys() - optional <= value.keys():
        raise ProtocolViolation("JSON with unexpected keys")
    for key, member in value.items():
        if not form[key](member):
            raise ProtocolViolation(f"an invalid value of {key}")
    return value


def is_count(value: Any) -> bool:
    """Whether it is an integer from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 1 << 63


def is_flag(value: Any) -> bool:
    """Whether it is True or False."""
    return type(value) is bool


def is_text(value: Any) -> bool:
    """Whether it is a string."""
    return isinstance(value, str)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, so that the text can be encoded."""
    return text.encode("utf-8", "replace").decode()


@dataclass(slots=True)
class InterpreterReply:
    """An interpreter's reply to one call. Its form is checked; its content is under the control of user code."""

    status: str
    value: str | None = None
    error: str | None = None
    traceback: str | None = None
    figures: tuple[bytes, ...] = ()
    dropped: int = 0


_REPLY_FORM: Form = {
    "id": is_count,
    "status": ("ok", "error", "exit", "interrupted", "memory").__contains__,
    "value": is_text,
    "error": is_text,
    "traceback": is_text,
    "figures": lambda value: isinstance(value, list) and len(value) <= 8 and all(map(is_text, value)),
    "dropped": is_count,
}
_REPLY_OPTIONAL = frozenset(_REPLY_FORM) - {"id", "status"}


def parse_reply(payload: bytes, number: int, max_characters: int) -> InterpreterReply:
    """Parse an interpreter's reply to call `number`, each text of at most about `max_characters`."""
    reply = parse(payload, _REPLY_FORM, _REPLY_OPTIONAL)
    if reply.pop("id") != number:
        raise ProtocolViolation("a reply to another call")
    for key in ("value", "error", "traceback"):
        if key in reply:
            text = reply[key]
            if len(text) > max(max_characters, 2000) + 64:
                raise ChannelFlooded(f"{key} of {len(text)} characters")
            reply[key] = replace_surrogates(text)
    figures = []
    for text in reply.pop("figures", ()):
        try:
            figures.append(base64.b64decode(text, validate=True))
        except (ValueError, binascii.Error) as error:
            raise ProtocolViolation("a figure that is not base64") from error
        if not figures[-1].startswith(_PNG):
            raise ProtocolViolation("a figure that is not a PNG")
    return InterpreterReply(**reply, figures=tuple(figures))
