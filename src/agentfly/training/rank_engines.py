"""One embedded engine per rank, which rank 0 uses as a fleet.

Requests go from rank 0 to the engine of another rank over gloo, point to point, and completions come back that way. New
weights are gathered by all ranks together (NCCL on GPUs), and every engine copies them on its own device.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from agentfly.backends.base import CLOSED, Backend, Request
from agentfly.backends.engine import TransformersBackend
from agentfly.backends.fleet import FleetBackend
from agentfly.errors import AgentFlyError, BackendFault, describe
from agentfly.templates.template import Template
from agentfly.threads import compute
from agentfly.training.sharding import Ranks
from agentfly.types import Completion


class RankFleet(FleetBackend):
    """The engines of all ranks, on rank 0."""

    def __init__(self, own: TransformersBackend, ranks: Ranks, update: Callable[[int], None]) -> None:
        """`own`: rank 0's engine; the others have the same settings. update: gives all engines weights of a version."""
        super().__init__([own, *(RemoteEngine(ranks, rank, own) for rank in range(1, ranks.size))])
        self._update = update

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Let every rank's engine take the learner's weights; `weights` is not read."""
        await compute(self._update, version)
        self._failures = [0] * len(self.members)
        for member in self.members[1:]:
            assert isinstance(member, RemoteEngine)
            member.version = version


class RemoteEngine(Backend):
    """The engine of another rank, seen from rank 0. It reports tokens when a turn is complete."""

    def __init__(self, ranks: Ranks, rank: int, like: TransformersBackend) -> None:
        """`like`: rank 0's own engine, which has the same settings."""
        self._like = like
        self.context_length = like.context_length
        self.version = like.weight_version
        self._ranks = ranks
        self._rank = rank
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Completion]] = {}
        self._closed = False
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"agentfly-rank-{rank}", daemon=True)
            for target in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def weight_version(self) -> int:
        return self.version

    def attach(self, template: Template) -> None:
        """Called after the template was attached to rank 0's engine; the other one loads the processor it needs."""
        self.supports_images = self._like.supports_images

    async def generate(self, request: Request) -> Completion:
        number = next(self._numbers)
        future: Future[Completion] = Future()
        self._pending[number] = future
        if self._closed:  # after the line above: the receiving thread fails what is pending when it ends
            del self._pending[number]
            raise BackendFault(CLOSED)
        self._outbox.put((number, replace(request, on_tokens=None, on_text=None)))
        try:
            completion = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._outbox.put((number, None))
            raise
        finally:
            self._pending.pop(number, None)
        if request.on_tokens is not None:
            request.on_tokens(completion.token_ids)
        return completion

    async def close(self) -> None:
        """Close the connection to the other rank. Pending requests fail."""
        if not self._closed:
            self._closed = True
            self._outbox.put(None)
            for thread in self._threads:
                await asyncio.to_thread(thread.join)

    def _send(self) -> None:
        with suppress(RuntimeError):  # the other rank is gone, which `_receive` reports
            while True:
                message = self._outbox.get()
                self._ranks.send(message, self._rank)
                if message is None:
                    return

    def _receive(self) -> None:
        fault: Exception = BackendFault(CLOSED)
        try:
            while (message := self._ranks.receive_from(self._rank)) is not None:
                number, result = message
                future = self._pending.get(number)
                if future is None or not future.set_running_or_notify_cancel():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        except RuntimeError as error:
            fault = BackendFault(f"the connection to rank {self._rank} is lost: {describe(error)}")
        self._closed = True
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(fault)


class RankEngineServer:
    """Answers rank 0's requests with this rank's engine, in threads of its own."""

    def __init__(self, ranks: Ranks, engine: Backend) -> None:
        self._ranks = ranks
        self._engine = engine
        self._running: dict[int, asyncio.Task[None]] = {}
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        for target in (self._loop.run_forever, self._receive, self._send):
            threading.Thread(target=target, name="agentfly-engine-server", daemon=True).start()

    def _receive(self) -> None:
        with suppress(RuntimeError):  # rank 0 is gone: the launcher ends this process
            while (message := self._ranks.receive_from(0)) is not None:
                self._loop.call_soon_threadsafe(self._handle, *message)
            self._outbox.put(None)

    def _send(self) -> None:
        with suppress(RuntimeError):
            while True:
                message = self._outbox.get()
                self._ranks.send(message, 0)
                if message is None:
                    return

    def _handle(self, number: int, request: Request | None) -> None:
        """Start a request, or cancel it."""
        if request is not None:
            self._running[number] = self._loop.create_task(self._answer(number, request))
        elif number in self._running:
            self._running[number].cancel()

    async def _answer(self, number: int, request: Request) -> None:
        result: Completion | Exception
        try:
            result = await self._engine.generate(request)
        except AgentFlyError as error:
            result = error
        except Exception as error:
            result = BackendFault(f"the engine of rank {self._ranks.rank} failed: {describe(error)}")
        finally:
            del self._running[number]
        self._outbox.put((number, result))
