"""Frames on a socket: four bytes of length, one byte of kind, then the payload."""

from __future__ import annotations

import socket
import struct

QUESTION, ANSWER, OUTPUT, REPLY, DATA = b"Q", b"A", b"O", b"R", b"D"
_HEAD = struct.Struct(">Ic")


class BrokenFrame(Exception):
    """The peer sent what is no frame, or more than it may."""


def pack(kind: bytes, payload: bytes) -> bytes:
    """A frame."""
    return _HEAD.pack(len(payload), kind) + payload


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def receive(channel: socket.socket, most: int) -> tuple[bytes, bytes]:
    """The next frame's kind and payload, which is at most `most` bytes; EOFError at the end."""
    length, kind = _HEAD.unpack(_exactly(channel, _HEAD.size))
    if length > most:
        raise BrokenFrame(f"a frame of {length} bytes, more than {most}")
    return kind, _exactly(channel, length)
