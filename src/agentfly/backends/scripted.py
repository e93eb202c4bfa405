"""A backend that replies from a script, through a real tokenizer: for tests, demos and benchmarks.

A script is a text, a list of texts (one per turn), or a function of the turn. Replies become real token ids with a
constant log-probability. Nothing is sampled, so only `max_tokens`, `stop` and `seed` of the sampling settings have an
effect; `seed` seeds the random numbers that the script can use.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

from pydantic import Field

from agentfly.backends.base import Backend, Request
from agentfly.errors import BackendFault, ConfigError
from agentfly.templates.template import Template
from agentfly.types import Completion, DefaultLimit, FinishReason
from agentfly.validation import NonNegativeFloat, PositiveInt, validate_arguments


class ScriptedTurn:
    """The turn that a script replies to."""

    __slots__ = ("_request", "_template", "chain", "random", "turn")

    def __init__(self, request: Request, template: Template) -> None:
        self._request = request
        self._template = template
        self.turn = request.turn
        """0 for the first reply of the chain."""
        self.chain = request.chain
        self.random = random.Random(request.sampling.seed)
        """Seeded by the request, so that a run with a seed can be repeated."""

    @property
    def prompt(self) -> str:
        """The whole text of the prompt."""
        return self._template.codec.decode(self._request.prompt)


Script = str | Sequence[str] | Callable[[ScriptedTurn], str | Awaitable[str]]
"""A reply for every turn, one reply per turn of a chain, or a function that computes the reply to a turn."""


class ScriptedBackend(Backend):
    """Returns fixed or computed replies as tokens."""

    weight_version = 0

    @validate_arguments
    def __init__(
        self,
        script: Script,
        *,
        latency: NonNegativeFloat | Callable[[Request], float] = 0.0,
        slots: PositiveInt | None = None,
        logprob: Annotated[float, Field(le=0)] = -0.1,
        context_length: PositiveInt | None = None,
        chunk: PositiveInt | None = None,
    ) -> None:
        """
        Args:
            script: A text for every turn, a list of texts (one per turn), or a function of the turn, also async.
            latency: Seconds per turn, or a function of the request.
            slots: Maximum number of turns in progress at once; None: no limit.
            logprob: Log-probability of every token.
            context_length: The limit that the backend reports.
            chunk: Number of tokens per call of `on_tokens`; an update of the weights takes effect with the next chunk.
                None: the whole turn at once.
        """
        if not callable(script) and not (script and all(isinstance(text, str) for text in script)):
            raise ConfigError(f"a script is text, a list of texts, or a function that gives text, not {script!r:.80}")
        self.context_length = context_length
        self.supports_images = True
        self._script = script
        self._latency = latency
        self._logprob = logprob
        self._chunk = chunk
        self._slots = None if slots is None else _PrioritySemaphore(slots)
        self._template: Template | None = None

    def attach(self, template: Template) -> None:
        if self._template is not None and self._template.codec.control != template.codec.control:
            raise ConfigError("this scripted backend already uses another tokenizer; create one for each")
        self._template = template

    async def update_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        self.weight_version = version

    async def generate(self, request: Request) -> Completion:
        """Return the next reply; it ends with the end-of-turn token unless a stop string or `max_tokens` cuts it."""
        if self._template is None:
            raise ConfigError("a scripted backend needs a template to encode its replies; pass it to an agent")
        if self._slots is None:
            return await self._reply(request, self._template)
        async with self._slots.acquire((request.priority, request.turn)):
            return await self._reply(request, self._template)

    async def _reply(self, request: Request, template: Template) -> Completion:
        # The text of the reply.
        text: Any
        if isinstance(self._script, str):
            text = self._script
        elif callable(self._script):
            text = self._script(ScriptedTurn(request, template))
            text = await text if inspect.isawaitable(text) else text
            if not isinstance(text, str):
                raise ConfigError(f"the script returned {text!r:.80}; it must return text")
        elif request.turn < len(self._script):
            text = self._script[request.turn]
        else:
            raise BackendFault(f"the script has {len(self._script)} turns, and the chain asks for one more")

        # Its token ids, up to the first stop string or the token limit.
        finish = FinishReason.STOP
        ends = [text.index(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        ids = template.codec.encode(text[: min(ends)]) if ends else [*template.codec.encode(text), template.close_id]
        limit = request.sampling.max_tokens
        # The default is for models that do not stop; without this, long calls of an expert would be cut.
        if limit is not None and not isinstance(limit, DefaultLimit) and len(ids) > limit:
            ids = ids[:limit]
            finish = FinishReason.LENGTH

        latency = self._latency(request) if callable(self._latency) else self._latency
        versions: list[int] = []
        step = self._chunk or len(ids)
        for start in range(0, len(ids), step):
            chunk = ids[start : start + step]
            version = self.weight_version
            if latency:
                await asyncio.sleep(latency * len(chunk) / len(ids))
            versions += [version] * len(chunk)
            if request.on_tokens is not None:
                request.on_tokens(chunk)
        return Completion(ids, [self._logprob] * len(ids), versions, finish)


class _PrioritySemaphore:
    """A semaphore that serves the lowest priority first, and equal ones in order of arrival."""

    def __init__(self, value: int) -> None:
        self._value = value
        self._arrivals = 0
        self._waiters: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def acquire(self, priority: tuple[int, int]) -> AsyncIterator[None]:
        if self._value > 0:
            self._value -= 1
        else:
            self._arrivals += 1
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiters, (priority, self._arrivals, waiter))
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():  # cancelled after it was granted the slot
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiters:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)
                return
        self._value += 1
