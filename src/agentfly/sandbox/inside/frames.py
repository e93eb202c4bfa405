"""The message format of the package: length of the payload (4 bytes, big-endian), kind (1 byte), payload.

Used on both ends of every byte stream: sandbox sessions, worker processes, the code judge. The only program of this
folder that the host imports too. It imports nothing but the standard library, and no asyncio.

    pack, receive, receive_alone   blocking end, for a trusted peer
    FrameBuffer                    non-blocking end, for a peer that may send anything and stop anywhere; the asyncio
                                   ends are `sandbox.channel.SessionChannel` and
                                   `resources.rpc.connection.FrameProtocol`
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket

QUESTION, ANSWER, OUTPUT, REPLY, DATA, CANCEL = b"Q", b"A", b"O", b"R", b"D", b"C"
NO_LIMIT = (1 << 32) - 1
"""Maximum length that a header can express."""
_HEADER = struct.Struct(">Ic")


class BrokenFrame(Exception):
    """The peer sent an invalid frame."""


class FrameTooLong(BrokenFrame):
    """The peer announced a payload over the limit."""


class Channel(Protocol):
    """A socket, or an object with its interface."""

    def fileno(self) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...


class PipeChannel:
    """Two pipes with the interface of one socket."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.fds = {read_fd, write_fd}
        self._read_fd = read_fd
        self._write_fd = write_fd

    def fileno(self) -> int:
        return self._read_fd

    def recv(self, size: int, /) -> bytes:
        return os.read(self._read_fd, size)

    def sendall(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._write_fd, view) :]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def pack(kind: bytes, payload: bytes, prefix: bytes = b"") -> bytes:
    """Return a frame. prefix: short bytes to put before the payload, without a second copy of it."""
    return _HEADER.pack(len(prefix) + len(payload), kind) + prefix + payload


def receive(channel: Channel, max_bytes: int) -> tuple[bytes, bytes]:
    """Return kind and payload of the next frame; EOFError at the end. Blocks until the frame is complete."""
    length, kind = _HEADER.unpack(_receive_exactly(channel, _HEADER.size))
    if length > max_bytes:
        raise FrameTooLong(f"a frame of {length} bytes, more than {max_bytes}")
    return kind, _receive_exactly(channel, length)


def receive_alone(channel: socket.socket, buffer: bytearray) -> bytes:
    """Return the payload of a frame after which the peer waits for an answer; EOFError at the end.

    Blocks until the frame is complete. One that fits into `buffer` takes one system call and allocates nothing but its
    payload: a process that has used up its memory can still receive it.
    """
    size = channel.recv_into(buffer)
    if not size:
        raise EOFError
    data = bytes(memoryview(buffer)[:size])
    if size < _HEADER.size:
        data += _receive_exactly(channel, _HEADER.size - size)
    missing = _HEADER.size + _HEADER.unpack_from(data)[0] - len(data)
    return (data + _receive_exactly(channel, missing) if missing else data)[_HEADER.size :]


def _receive_exactly(channel: Channel, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = channel.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


class FrameBuffer:
    """Assembles frames from the bytes of an untrusted peer. `limits`: maximum payload of each accepted kind."""

    def __init__(self, limits: Mapping[bytes, int]) -> None:
        self._limits = limits
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._data += data

    def next(self, kinds: Collection[bytes] | None = None, budget: int = NO_LIMIT) -> tuple[bytes, bytes] | None:
        """Return kind and payload of the next frame, or None while it is incomplete.

        Raises as soon as the header is there: BrokenFrame for a kind that is not in `kinds` (None: in `limits`), and
        FrameTooLong for a payload over the limit of its kind or over `budget`.
        """
        if len(self._data) < _HEADER.size:
            return None
        length, kind = _HEADER.unpack_from(self._data)
        if kind not in (self._limits if kinds is None else kinds):
            raise BrokenFrame(f"a frame of kind {kind!r}")
        # Checked by the header: a peer that announces four gigabytes is refused before any of them is buffered.
        max_bytes = min(self._limits[kind], budget)
        if length > max_bytes:
            raise FrameTooLong(f"a frame of {length} bytes, more than {max(max_bytes, 0)}")
        end = _HEADER.size + length
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[_HEADER.size : end])
        del self._data[:end]
        return kind, payload
