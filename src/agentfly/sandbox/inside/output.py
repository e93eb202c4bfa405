"""The pipe that every process of a session writes to: keeps the head and the tail of a call, counts what is between."""

from __future__ import annotations

import os
import time

_CHUNK = 1 << 16
_MIN_FLOOD = 64 << 20
FLUSH_SECONDS = 0.02
"""How long output is buffered before it is sent, unless the call ends first."""


class OutputPipe:
    """Pipe behind file descriptors 1 and 2. It is always read, so that writers never block for long."""

    def __init__(self, max_characters: int) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.buffer = bytearray()
        self.dropped = 0
        self._tail = bytearray()
        """The last bytes after the head. A test run says at its end what failed."""
        self._half_bytes = max_characters * 2
        """Bytes of the head, and of the tail."""
        self._flood_bytes = max(_MIN_FLOOD, 1024 * max_characters)
        self._sent = 0
        self._received = 0
        self._buffered_since = 0.0

    def start_call(self) -> None:
        """Reset the counters. What was written since the last call becomes output of the new one."""
        self._sent = self._received = self.dropped = 0
        self._buffered_since = time.monotonic()

    def read(self) -> None:
        """Read what is in the pipe, at most 1 MB."""
        for _ in range(16):
            try:
                data = os.read(self.read_fd, _CHUNK)
            except BlockingIOError:
                return
            if not self.buffer:
                self._buffered_since = time.monotonic()
            head = data[: max(self._half_bytes - self._sent - len(self.buffer), 0)]
            self.buffer += head
            self._tail += data[len(head) :]
            excess = max(len(self._tail) - self._half_bytes, 0)
            del self._tail[:excess]
            self.dropped += excess
            self._received += len(data)

    def check_flood(self) -> bool:
        """Whether so much was written that the writers must be killed; True once per flood."""
        flooded = self._received > self._flood_bytes
        if flooded:
            self._received = 0
        return flooded

    def flush_due(self) -> bool:
        """Whether the buffer has waited long enough to be sent."""
        return bool(self.buffer) and time.monotonic() - self._buffered_since > FLUSH_SECONDS

    def end_call(self) -> None:
        """Read what is left, and put the tail behind the head."""
        self.read()
        self.buffer += self._tail
        self._tail.clear()

    def take(self) -> bytes:
        """Remove and return the buffer, which counts as sent."""
        taken = bytes(self.buffer)
        self._sent += len(taken)
        self.buffer.clear()
        return taken
