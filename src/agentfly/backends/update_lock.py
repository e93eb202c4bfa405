"""Turns come and go; an update waits until none is under way, and holds back those that come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_LOOK = 0.01
"""Seconds between two looks: turns may be in any event loop, and loops have nothing in common to wait for."""


class UpdateLock:
    """Open to turns, or closed for an update."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns, self._updating = 0, False

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Be a turn under way."""
        while not self._enter():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        try:
            yield
        finally:
            with self._lock:
                self._turns -= 1

    @asynccontextmanager
    async def update(self) -> AsyncGenerator[None]:
        """Be the only one."""
        while not self._close():  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        try:
            while self._turns:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK)
            yield
        finally:
            self._updating = False

    def _enter(self) -> bool:
        with self._lock:
            self._turns += not self._updating
            return not self._updating

    def _close(self) -> bool:
        with self._lock:
            was, self._updating = self._updating, True
            return not was
