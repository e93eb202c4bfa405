"""A backend that says what it is told to say, through a real tokenizer: for tests, demos and benchmarks.

A script is text, a list of texts (one a turn), or a function of the turn. Words become real ids; the log-probabilities
are those of a model that was all but sure. Nothing is drawn, so of the sampling only `max_tokens`, `stop` and `seed`
(of the script's own random numbers) mean anything here.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentfly.backends.base import Backend, Request
from agentfly.errors import BackendFault, ConfigError
from agentfly.templates.template import Template
from agentfly.types import Completion, FinishReason


class ScriptedTurn:
    """What a script sees."""

    __slots__ = ("_request", "_template", "chain", "random", "turn")

    def __init__(self, request: Request, template: Template) -> None:
        self._request, self._template = request, template
        self.turn = request.turn
        """0 for the chain's first reply."""
        self.chain = request.chain
        self.random = random.Random(request.sampling.seed)
        """Seeded by the request, so that a run with a seed repeats."""

    @property
    def prompt(self) -> str:
        """All of the prompt's text."""
        return self._template.codec.decode(self._request.prompt)


Script = str | Sequence[str] | Callable[[ScriptedTurn], str | Awaitable[str]]
"""A reply for every turn, one reply per turn of a chain, or a function that computes the reply to a turn."""


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

        `chunk` is how many tokens are sampled at a time: whoever watches is handed them then, and new weights count
        from the next ones on. None samples a whole turn at once.
        """
        if not callable(script) and not (script and all(isinstance(each, str) for each in script)):
            raise ConfigError(f"a script is text, a list of texts, or a function that gives text, not {script!r:.80}")
        if (slots is not None and slots < 1) or (chunk is not None and chunk < 1):
            raise ConfigError(f"slots and chunk must be at least 1, not {slots} and {chunk}; None means no limit")
        self._script, self._latency, self._logprob = script, latency, logprob
        self._chunk, self.context_length = chunk, context_length
        self._queue = None if slots is None else _Queue(slots)
        self._version = 0
        self._template: Template | None = None

    @property
    def weight_version(self) -> int:
        return self._version

    def attach(self, template: Template) -> None:
        if self._template is not None and self._template.codec.control != template.codec.control:
            raise ConfigError("this scripted backend speaks through another tokenizer already; make one for each")
        self._template = template

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self._version = version

    async def generate(self, request: Request) -> Completion:
        """Say the script's next words, closed by the end-of-turn token unless a stop string or the limit ends them."""
        if self._template is None:
            raise ConfigError("a scripted backend needs a template to speak through; hand it to an agent")
        if self._queue is None:
            return await self._speak(request, self._template)
        async with self._queue.place(request.turn):
            return await self._speak(request, self._template)

    async def _speak(self, request: Request, template: Template) -> Completion:
        ids, finish = _cut(await self._words(request, template), request, template)
        latency = self._latency(request) if callable(self._latency) else self._latency
        versions: list[int] = []
        step = self._chunk or len(ids)
        for at in range(0, len(ids), step):
            chunk, version = ids[at : at + step], self._version
            if latency:
                await asyncio.sleep(latency * len(chunk) / len(ids))
            versions += [version] * len(chunk)
            if request.on_tokens is not None:
                request.on_tokens(chunk)
        return Completion(ids, [self._logprob] * len(ids), versions, finish)

    async def _words(self, request: Request, template: Template) -> str:
        if isinstance(self._script, str):
            return self._script
        if not callable(self._script):
            if request.turn >= len(self._script):
                raise BackendFault(f"the script has {len(self._script)} turns, and the chain asks for one more")
            return self._script[request.turn]
        said = self._script(ScriptedTurn(request, template))
        said = await said if inspect.isawaitable(said) else said
        if not isinstance(said, str):
            raise ConfigError(f"the script said {said!r:.80}; it must say text")
        return said


def _cut(text: str, request: Request, template: Template) -> tuple[list[int], FinishReason]:
    """The ids of what is said, up to the first stop string or the token limit."""
    ends = [text.index(stop) + len(stop) for stop in request.sampling.stop if stop in text]
    ids = template.codec.encode(text[: min(ends)]) if ends else [*template.codec.encode(text), template.close_id]
    limit = request.sampling.max_tokens
    return (ids, FinishReason.STOP) if limit is None or len(ids) <= limit else (ids[:limit], FinishReason.LENGTH)


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
