"""The worker's end of a line: every request is a task of its own, until the host is gone."""

from __future__ import annotations

import asyncio
import socket

from agentfly.resources.remote.line import ANSWER, CANCEL, REQUEST, Frames
from agentfly.resources.remote.serving import Servant


class Desk(Frames):
    """Takes requests in, has them answered, and sends the answers."""

    most = (1 << 32) - 1

    def __init__(self) -> None:
        super().__init__()
        self._servant = Servant()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.over = asyncio.Event()

    def taken(self, kind: bytes, number: int, payload: bytes) -> None:
        """Begin what is asked for, or cancel it."""
        if kind == REQUEST:
            task = self._tasks[number] = asyncio.create_task(self._answer(number, payload))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif kind == CANCEL and number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, request: bytes) -> None:
        self.send(ANSWER, number, await self._servant.answer(request))

    def lost(self) -> None:
        """The host is gone."""
        self.over.set()


async def serve(end: socket.socket) -> None:
    """Answer what comes over a connected socket until it closes."""
    _, desk = await asyncio.get_running_loop().create_unix_connection(Desk, sock=end)
    await desk.over.wait()
