"""The actor that one instance lives in, and the way to it."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from agentfly.errors import EnvironmentFault
from agentfly.resources.on_ray.cluster import Lost, answered, installed, sent
from agentfly.resources.remote.serving import Servant
from agentfly.resources.sandbox.inside import kernel, tree


class Seat:
    """Serves one instance. Runs in a worker process of its own, on some node."""

    def __init__(self) -> None:
        self._servant = Servant()
        if sys.platform == "linux":
            kernel.adopt_orphans()

    async def answer(self, request: bytes) -> bytes:
        """Carry a request out."""
        return await self._servant.answer(request)

    async def node(self) -> str:
        """Where it is, for messages."""
        ray = installed()
        return f"node {ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"

    async def memory(self) -> int | None:
        """Bytes that this process and all below it hold."""
        if sys.platform != "linux":
            return None
        return tree.memory([os.getpid(), *tree.descendants(os.getpid())], 0)

    async def clear(self) -> None:
        """End all processes below this one: Ray ends only the children of a worker, not theirs."""
        if sys.platform == "linux":
            tree.kill_below(os.getpid())

    async def stay(self) -> None:
        """Never return: who waits for this learns of its death."""
        await asyncio.Event().wait()


class Way:
    """Carries requests to a seat; a transport for a stand-in."""

    def __init__(self, seat: Any, what: str) -> None:
        self._seat, self._what = seat, what

    async def ask(self, request: bytes) -> bytes:
        """The answer; a cancellation is passed on."""
        try:
            answering = sent(self._seat, "answer", request)
            try:
                answer: bytes = await answered(answering)
            except asyncio.CancelledError:
                installed().cancel(answering)
                raise
        except Lost as lost:
            raise EnvironmentFault(f"{self._what} is lost: {lost}") from lost
        return answer
