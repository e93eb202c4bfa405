"""A backend that says what it is told to say, through a real tokenizer: for tests, demos and benchmarks.

A script is text, a list of texts (one a turn), or a function of the turn. Words become real ids; the log-probabilities
are those of a model that was all but sure.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentfly.backend import Backend, Request
from agentfly.errors import BackendFault, ConfigError
from agentfly.template import Template
from agentfly.types import Completion, Finish


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """What a script sees."""

    prompt: str
    """All of the prompt's text."""
    turn: int
    """0 for the chain's first reply."""
    chain: str
    random: random.Random
    """Seeded by the request, so that a run with a seed repeats."""


Script = str | Sequence[str] | Callable[[ScriptedTurn], str | Awaitable[str]]


class ScriptedBackend(Backend):
    """Canned or computed replies as tokens."""

    def __init__(
        self,
        script: Script,
        *,
        latency: float | Callable[[Request], float] = 0.0,
        slots: int | None = None,
        logprob: float = -0.1,
        context_length: int | None = None,
        chunk: int | None = None,
    ) -> None:
        """`latency` is seconds a turn, or a function of the request; `slots` how many turns are sampled at once.

        `chunk` is how many tokens are handed on at a time to whoever watches; None hands on a whole turn.
        """
        if not callable(script) and not isinstance(script, str) and not script:
            raise ConfigError("a scripted backend needs at least one reply")
        self._script, self._latency, self._logprob = script, latency, logprob
        self._chunk, self.context_length = chunk, context_length
        self._queue = None if slots is None else _Queue(slots)
        self._version = 0
        self._template: Template | None = None

    @property
    def weight_version(self) -> int:
        return self._version

    def attach(self, template: Template) -> None:
        self._template = template

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self._version = version

    async def generate(self, request: Request) -> Completion:
        """Say the script's next words, closed by the end-of-turn token unless the token limit cuts them off."""
        template = self._template
        if template is None:
            raise ConfigError("a scripted backend needs a template to speak through; hand it to an agent")
        if self._queue is None:
            ids = await self._speak(request, template)
        else:
            async with self._queue.place(request.turn):
                ids = await self._speak(request, template)
        limit = request.sampling.max_tokens
        finish = Finish.STOP if limit is None or len(ids) <= limit else Finish.LENGTH
        ids = ids[:limit]
        return Completion(ids, [self._logprob] * len(ids), [self._version] * len(ids), finish)

    async def _speak(self, request: Request, template: Template) -> list[int]:
        text = await self._words(request, template)
        ids = [*template.codec.encode(text), template.close_id]
        latency = self._latency(request) if callable(self._latency) else self._latency
        if request.on_tokens is None:
            if latency:
                await asyncio.sleep(latency)
            return ids
        step = self._chunk or len(ids)
        for at in range(0, len(ids), step):
            await asyncio.sleep(latency * min(step, len(ids) - at) / len(ids))
            request.on_tokens(ids[at : at + step])
        return ids

    async def _words(self, request: Request, template: Template) -> str:
        if isinstance(self._script, str):
            return self._script
        if not callable(self._script):
            if request.turn >= len(self._script):
                raise BackendFault(f"the script has {len(self._script)} replies, and the chain asks for one more")
            return self._script[request.turn]
        rng = random.Random(request.sampling.seed)
        said = self._script(ScriptedTurn(template.codec.decode(request.prompt), request.turn, request.chain, rng))
        return await said if inspect.isawaitable(said) else said


class _Queue:
    """A fixed number of places. Whoever is least far along goes first, and among equals whoever came first."""

    def __init__(self, places: int) -> None:
        self._free, self._count = places, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def place(self, turn: int) -> AsyncIterator[None]:
        if self._free > 0:
            self._free -= 1
        else:
            self._count += 1
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (turn, self._count, ready))
            try:
                await ready
            except asyncio.CancelledError:
                if ready.done() and not ready.cancelled():
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._waiting:
            ready = heapq.heappop(self._waiting)[2]
            if not ready.done():
                ready.set_result(None)
                return
        self._free += 1
