"""Frames on a socket: four bytes of length, one byte of kind, then the payload."""

from __future__ import annotations

import struct
from typing import Protocol

QUESTION, ANSWER, OUTPUT, REPLY, DATA = b"Q", b"A", b"O", b"R", b"D"
_HEAD = struct.Struct(">Ic")


class BrokenFrame(Exception):
    """The peer sent what is no frame, or more than it may."""


class Channel(Protocol):
    """A socket, or what is used as one."""

    def fileno(self) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...


def pack(kind: bytes, payload: bytes) -> bytes:
    """A frame."""
    return _HEAD.pack(len(payload), kind) + payload


def _exactly(channel: Channel, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def receive(channel: Channel, most: int) -> tuple[bytes, bytes]:
    """The next frame's kind and payload, at most `most` bytes; EOFError at the end. It blocks: for a trusted peer."""
    length, kind = _HEAD.unpack(_exactly(channel, _HEAD.size))
    if length > most:
        raise BrokenFrame(f"a frame of {length} bytes, more than {most}")
    return kind, _exactly(channel, length)


class Inbox:
    """Frames out of whatever bytes came so far, from a peer that may stop in the middle or lie."""

    def __init__(self, kinds: bytes, most: int) -> None:
        self._bytes = bytearray()
        self._kinds = kinds
        self._most = most

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        self._bytes += data

    def next(self) -> tuple[bytes, bytes] | None:
        """The next whole frame, or None where there is none yet."""
        if len(self._bytes) < _HEAD.size:
            return None
        length, kind = _HEAD.unpack_from(self._bytes)
        if kind not in self._kinds:
            raise BrokenFrame(f"a frame of kind {kind!r}")
        if length > self._most:
            raise BrokenFrame(f"a frame of {length} bytes, more than {self._most}")
        end = _HEAD.size + length
        if len(self._bytes) < end:
            return None
        payload = bytes(self._bytes[_HEAD.size : end])
        del self._bytes[:end]
        return kind, payload
