"""The pipe that every process of a session writes to: what fits in a call's limit is kept, the rest is counted."""

from __future__ import annotations

import os
import time

CHUNK = 1 << 16
_LEAST_FLOOD = 64 << 20
GATHER = 0.02
"""Seconds that output waits for more, or for the end of the call, before it is passed on."""


class Output:
    """Where fd 1 and 2 lead. Nobody blocks on it for long: it is always read."""

    def __init__(self, characters: int) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self.kept = bytearray()
        self.dropped = 0
        self._most = characters * 4
        self._flood = max(_LEAST_FLOOD, 1024 * characters)
        self._sent = self._seen = 0
        self._since = 0.0

    def begin(self) -> None:
        """A call begins: what was written since the last one is its first output."""
        self._sent = self._seen = self.dropped = 0
        self._since = time.monotonic()

    def gather(self) -> None:
        """Read once round."""
        for _ in range(16):
            try:
                data = os.read(self.reading, CHUNK)
            except BlockingIOError:
                return
            if not self.kept:
                self._since = time.monotonic()
            fits = data[: max(self._most - self._sent - len(self.kept), 0)]
            self.kept += fits
            self.dropped += len(data) - len(fits)
            self._seen += len(data)

    def flooded(self) -> bool:
        """Whether it was so much that its writers must end; true once."""
        over = self._seen > self._flood
        if over:
            self._seen = 0
        return over

    def due(self) -> bool:
        """Whether kept output has waited long enough."""
        return bool(self.kept) and time.monotonic() - self._since > GATHER

    def take(self) -> bytes:
        """What is kept; it then counts as passed on."""
        taken = bytes(self.kept)
        self._sent += len(taken)
        self.kept.clear()
        return taken
