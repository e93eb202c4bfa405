"""The host's end of a session's socket. Every byte that comes is hostile until it has been checked.

A frame is four bytes of length, one byte of kind, the payload. Kind and length are checked before a payload is read,
the whole call has a budget of bytes, JSON must have exactly the expected form. What breaks a rule ends the session.
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

QUESTION, ANSWER, OUTPUT, REPLY, DATA = b"Q", b"A", b"O", b"R", b"D"
_HEAD = struct.Struct(">Ic")
_MOST = {ANSWER: 8 << 20, OUTPUT: 4 << 20, REPLY: 24 << 20, DATA: 1 << 20}
_FRAME_COST = 64  # so that empty frames use up a budget too
_PNG = b"\x89PNG\r\n\x1a\n"
_CREDENTIALS = struct.Struct("3i")


class WireError(Exception):
    """The session can no longer be talked to."""


class WireClosed(WireError):
    """The other end is gone."""


class WireBroken(WireError):
    """What came breaks the protocol."""


class WireFlooded(WireError):
    """More came than one call may send."""


class WireExpired(WireError):
    """Nothing came in time."""


class Wire:
    """Frames to and from one session."""

    def __init__(self, end: socket.socket, unwrap: Callable[[bytes], bytes] = bytes) -> None:
        end.setblocking(False)
        self._socket = end
        self._unwrap = unwrap
        """Takes off what a transport wraps around the bytes."""
        self.gone = False
        """Whether the other end was found gone."""
        self._buffer = bytearray()
        self._budget = self._frames = 0
        self._waiting: asyncio.Future[None] | None = None
        self._expired = False

    def hung_up(self) -> bool:
        """Whether the other end is gone, where that can be told while nobody talks. It takes nothing off the wire."""
        if self._expired:
            return True
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Let go of the socket."""
        self.expire()
        self._socket.close()

    def expire(self) -> None:
        """Whoever waits for bytes waits no more."""
        self._expired = True
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(None)

    def allow(self, budget: int) -> None:
        """How many more bytes may come."""
        self._budget = budget

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Send a frame."""
        view = memoryview(_HEAD.pack(len(payload), kind) + payload)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                await self._wait(writing=True)
            except OSError as error:
                self.gone = True
                raise WireClosed(str(error)) from error

    def send_now(self, kind: bytes, payload: bytes) -> None:
        """Send a short frame without waiting; where it does not fit nobody is listening, and time will tell."""
        with contextlib.suppress(OSError):
            self._socket.send(_HEAD.pack(len(payload), kind) + payload)

    async def receive(self, *kinds: bytes) -> tuple[bytes, bytes]:
        """The next frame, which must be of one of these kinds."""
        if self._expired:
            raise WireExpired
        await self._fill(_HEAD.size)
        length, kind = _HEAD.unpack_from(self._buffer)
        if kind not in kinds:
            raise WireBroken(f"a frame of kind {kind!r}")
        if length > min(_MOST[kind], self._budget):
            raise WireFlooded(f"a frame of {length} bytes")
        await self._fill(_HEAD.size + length)
        payload = bytes(memoryview(self._buffer)[_HEAD.size : _HEAD.size + length])
        del self._buffer[: _HEAD.size + length]
        self._budget -= length + _FRAME_COST
        self._frames += 1
        if self._frames % 64 == 0:  # others have their turn even while frames come without a pause
            await asyncio.sleep(0)
        return kind, payload

    async def hello(self) -> int | None:
        """Wait for the first byte; the process that sent it, as the kernel tells, where the socket asks for that."""
        await self._wait()
        try:
            data, told, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError as error:
            raise WireClosed(str(error)) from error
        if not data:
            raise WireClosed("ended before it began")
        self._buffer += data
        for level, kind, content in told:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                return int(_CREDENTIALS.unpack(content)[0])
        return None

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            if self._expired:
                raise WireExpired
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                await self._wait()
                continue
            except OSError as error:
                self.gone = True
                raise WireClosed(str(error)) from error
            if not data:
                self.gone = True
                raise WireClosed("the other end is gone")
            self._buffer += self._unwrap(data)

    async def _wait(self, writing: bool = False) -> None:
        """Until the socket is ready. It reads nothing itself, so a cancellation loses nothing."""
        loop = asyncio.get_running_loop()
        self._waiting = loop.create_future()
        add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        file = self._socket.fileno()
        add(file, _wake, self._waiting)
        try:
            await self._waiting
        finally:
            remove(file)
            self._waiting = None
        if self._expired:
            raise WireExpired


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def parse(
    payload: bytes, form: Mapping[str, Callable[[Any], bool]], optional: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """JSON of exactly this form: every key there, none other, every value accepted."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise WireBroken(f"no JSON: {type(error).__name__}") from error
    if not isinstance(value, dict) or not set(form) - optional <= set(value) <= set(form):
        raise WireBroken("JSON with other keys than agreed")
    for key, found in value.items():
        if not form[key](found):
            raise WireBroken(f"{key} is not what was agreed")
    return value


def is_count(value: Any) -> bool:
    """A whole number, not negative, not huge."""
    return type(value) is int and 0 <= value < 1 << 63


def is_text(value: Any) -> bool:
    """Text."""
    return isinstance(value, str)


def is_text_or_none(value: Any) -> bool:
    """Text, or none."""
    return value is None or isinstance(value, str)


def clean(text: str) -> str:
    """Text that can be encoded: lone surrogates replaced."""
    return text.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class Reply:
    """What an interpreter said of one cell, checked for form; whether it is true, only user code knows."""

    status: str
    value: str | None
    error: str | None
    traceback: str | None
    figures: tuple[bytes, ...]
    dropped: int


_STATUSES = ("ok", "error", "exit", "interrupted", "memory")
_REPLY_FORM: dict[str, Callable[[Any], bool]] = {
    "id": is_count,
    "status": _STATUSES.__contains__,
    "value": is_text_or_none,
    "error": is_text_or_none,
    "traceback": is_text_or_none,
    "figures": lambda value: isinstance(value, list) and len(value) <= 8 and all(map(is_text, value)),
    "dropped": is_count,
}


def parse_reply(payload: bytes, number: int, most: int) -> Reply:
    """An interpreter's reply to call `number`; texts are at most about `most` characters."""
    said = parse(payload, _REPLY_FORM)
    if said["id"] != number:
        raise WireBroken("a reply to another call")
    texts = {}
    for key in ("value", "error", "traceback"):
        text = said[key]
        if text is not None and len(text) > max(most, 2000) + 64:
            raise WireFlooded(f"{key} of {len(text)} characters")
        texts[key] = None if text is None else clean(text)
    figures = tuple(_figure(text) for text in said["figures"])
    return Reply(status=said["status"], figures=figures, dropped=said["dropped"], **texts)


def _figure(text: str) -> bytes:
    try:
        image = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise WireBroken("a figure that is no base64") from error
    if not image.startswith(_PNG):
        raise WireBroken("a figure that is no PNG")
    return image
