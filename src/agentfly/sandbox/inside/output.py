"""The pipe that every process of a session writes to: keeps what fits in the limit of a call, counts the rest."""

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
        self._max_bytes = max_characters * 4
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
            kept = data[: max(self._max_bytes - self._sent - len(self.buffer), 0)]
            self.buffer += kept
            self.dropped += len(data) - len(kept)
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

    def take(self) -> bytes:
        """Remove and return the buffer, which counts as sent."""
        taken = bytes(self.buffer)
        self._sent += len(taken)
        self.buffer.clear()
        return taken
