"""The stream of an attached container: its stdout and stderr in turns, each piece with eight bytes before it."""

from __future__ import annotations

import struct

_HEAD = struct.Struct(">BxxxI")
_OUT = 1
_MOST_COMPLAINT = 4000


class Demultiplexer:
    """Gives stdout, where the frames are, and keeps the first of stderr, where only a failing start complains."""

    def __init__(self) -> None:
        self.complaint = b""
        self._head = b""
        self._kind = self._left = 0

    def __call__(self, data: bytes) -> bytes:
        """What of these bytes the container wrote to stdout; they may begin and end anywhere."""
        out = bytearray()
        view = memoryview(data)
        while view:
            if not self._left:
                missing = _HEAD.size - len(self._head)
                self._head += view[:missing]
                view = view[missing:]
                if len(self._head) == _HEAD.size:
                    self._kind, self._left = _HEAD.unpack(self._head)
                    self._head = b""
                continue
            piece = view[: self._left]
            view = view[len(piece) :]
            self._left -= len(piece)
            if self._kind == _OUT:
                out += piece
            else:
                self.complaint += bytes(piece[: _MOST_COMPLAINT - len(self.complaint)])
        return bytes(out)
