"""What holds the processes of one session: opens them, ends them, tells how they ended."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable

from agentfly.resources.sandbox import wire
from agentfly.resources.sandbox.limits import Limits


class Cell(ABC):
    """The processes, files and wire of one session, and all that must be got rid of again."""

    wire: wire.Wire
    folder: str
    """The working folder, as the session sees it."""

    def __init__(self, limits: Limits, forget: Callable[[Cell], object]) -> None:
        self.limits = limits
        self._forget = forget
        """Told when it has ended."""
        self._ending: asyncio.Task[int | None] | None = None

    @abstractmethod
    async def open(self) -> None:
        """Make it, up to a keeper that is ready."""

    @abstractmethod
    async def _end(self) -> int | None:
        """Kill all and forget all; the first process's wait status, or None where it is not known."""

    @abstractmethod
    def memory_kills(self) -> int:
        """How many processes the kernel has killed for memory, where it can be told from outside."""

    @abstractmethod
    async def memory(self) -> int | None:
        """Bytes that it holds; None where nobody counts them."""

    @abstractmethod
    async def pause(self, paused: bool) -> None:
        """Use no processor, or go on."""

    def end(self) -> asyncio.Task[int | None]:
        """Kill all and forget all. Called often, done once."""
        if self._ending is None or self._ending.cancelled():  # a loop that shuts down cancels everything
            self._ending = asyncio.get_running_loop().create_task(self._end())
            self._ending.add_done_callback(self._ended)
        return self._ending

    async def over(self) -> int | None:
        """End, and wait for it."""
        while True:
            ending = self.end()
            try:
                return await asyncio.shield(ending)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not ending.cancelled() or (task is not None and task.cancelling()):
                    raise  # the one who waits was cancelled, and not the ending

    def _ended(self, ending: asyncio.Task[int | None]) -> None:
        if not ending.cancelled():
            self._forget(self)
            ending.exception()  # seen: not everybody who ends a cell waits for it

    async def _begin(self) -> None:
        """Let the keeper go on; it has said hello and is where it belongs."""
        await self.wire.send(wire.QUESTION, json.dumps({"do": "start"}).encode())
        await self._expect("ready")

    async def _expect(self, word: str) -> None:
        _, payload = await self.wire.receive(wire.ANSWER)
        said = wire.parse(payload, {word: wire.is_count, "failed": wire.is_text}, frozenset((word, "failed")))
        if word not in said:
            raise wire.WireBroken(said.get("failed", "it did not say what was expected")[:500])
