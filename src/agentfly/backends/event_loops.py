"""One backend in several event loops: an HTTP client per loop, and a lock between turns and weight updates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import httpx

_POLL_INTERVAL = 0.01
"""Seconds. `UpdateLock` polls, since event loops have no common primitive to wait on."""


class LoopClient(NamedTuple):
    """The HTTP client of one event loop."""

    client: httpx.AsyncClient
    lock: asyncio.Lock
    owner: AsyncGenerator[httpx.AsyncClient, None]
    """Closes the client."""


class LoopClients:
    """An HTTP client for each event loop: connections cannot be shared between loops."""

    def __init__(self, **settings: Any) -> None:
        """settings: arguments of httpx.AsyncClient."""
        self._settings = settings
        self._clients: dict[asyncio.AbstractEventLoop, LoopClient] = {}

    async def get(self) -> LoopClient:
        """Return the client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            for closed_loop in [known_loop for known_loop in self._clients if known_loop.is_closed()]:
                self._clients.pop(closed_loop, None)
            owner = self._open()
            self._clients[loop] = LoopClient(await anext(owner), asyncio.Lock(), owner)
        return self._clients[loop]

    async def close(self) -> None:
        """Close the clients of all running event loops; a loop that has ended has closed its own."""
        current = asyncio.get_running_loop()
        while self._clients:
            loop, entry = self._clients.popitem()
            if loop is current:
                with suppress(RuntimeError):  # the generator is running: the loop is ending and closes it now
                    await entry.owner.aclose()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(entry.owner.aclose(), loop))

    async def _open(self) -> AsyncGenerator[httpx.AsyncClient, None]:
        """A generator, because an ending event loop closes its async generators: no connection outlives it."""
        client = httpx.AsyncClient(**self._settings)
        try:
            yield client
        finally:
            await client.aclose()


class UpdateLock:
    """Readers-writer lock: turns share it, a weight update holds it exclusively and blocks new turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = 0
        self._updating = False

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Hold the lock for a turn; waits while an update is pending or running."""
        while True:
            with self._lock:
                if not self._updating:
                    self._turns += 1
                    break
            await asyncio.sleep(_POLL_INTERVAL)
        try:
            yield
        finally:
            with self._lock:
                self._turns -= 1

    @asynccontextmanager
    async def update(self) -> AsyncGenerator[None]:
        """Hold the lock for an update; waits for other updates and for running turns."""
        while True:
            with self._lock:
                if not self._updating:
                    self._updating = True
                    break
            await asyncio.sleep(_POLL_INTERVAL)
        try:
            while self._turns:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_INTERVAL)
            yield
        finally:
            self._updating = False
