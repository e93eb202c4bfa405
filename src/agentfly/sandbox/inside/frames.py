"""Frames on a socket: length (4 bytes), kind (1 byte), payload."""

from __future__ import annotations

import struct
from typing import Protocol

QUESTION, ANSWER, OUTPUT, REPLY, DATA = b"Q", b"A", b"O", b"R", b"D"
_HEADER = struct.Struct(">Ic")


class BrokenFrame(Exception):
    """The peer sent an invalid or too long frame."""


class Channel(Protocol):
    """A socket, or an object with its interface."""

    def fileno(self) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...


def pack(kind: bytes, payload: bytes) -> bytes:
    """Return a frame."""
    return _HEADER.pack(len(payload), kind) + payload


def _receive_exactly(channel: Channel, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def receive(channel: Channel, max_bytes: int) -> tuple[bytes, bytes]:
    """Return kind and payload of the next frame; EOFError at the end. Blocks: only for a trusted peer."""
    length, kind = _HEADER.unpack(_receive_exactly(channel, _HEADER.size))
    if length > max_bytes:
        raise BrokenFrame(f"a frame of {length} bytes, more than {max_bytes}")
    return kind, _receive_exactly(channel, length)


class FrameBuffer:
    """Assembles frames from the bytes of an untrusted peer, which may stop in the middle of a frame."""

    def __init__(self, kinds: bytes, max_bytes: int) -> None:
        self._data = bytearray()
        self._kinds = kinds
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._data += data

    def next(self) -> tuple[bytes, bytes] | None:
        """Return kind and payload of the next complete frame, or None. Raises BrokenFrame."""
        if len(self._data) < _HEADER.size:
            return None
        length, kind = _HEADER.unpack_from(self._data)
        if kind not in self._kinds:
            raise BrokenFrame(f"a frame of kind {kind!r}")
        if length > self._max_bytes:
            raise BrokenFrame(f"a frame of {length} bytes, more than {self._max_bytes}")
        end = _HEADER.size + length
        if len(self._data) < end:
            return None
        payload = bytes(self._data[_HEADER.size : end])
        del self._data[:end]
        return kind, payload
