"""A request under way: its tokens, what of them is in the cache, and when it ends."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence

from agentfly.backends.base import Request, Tokens
from agentfly.backends.engine.kv_cache import Block
from agentfly.backends.engine.sampler import SamplingRow, uniform
from agentfly.types import Completion, FinishReason

Decode = Callable[[Sequence[int]], str]
_numbers = itertools.count()


class EngineRequest:
    """One turn as it is sampled."""

    def __init__(self, request: Request, prompt: Tokens, limit: int, decode: Decode) -> None:
        self.request, self.prompt, self.limit = request, prompt, limit
        self.number = next(_numbers)
        """In the order of asking."""
        self.tokens: list[int] = prompt.tolist()
        """The prompt and what was sampled."""
        self.cached = 0
        """How many of them are in the arena, under the weights of now."""
        self.stretch: Block | None = None
        """Where; None while it waits."""
        self.logprobs: list[float] = []
        self.raw_logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: FinishReason | None = None
        """How it ended; None while it has not."""
        self._decode = decode
        seed = request.sampling.seed
        self.seed = secrets.randbits(64) if seed is None else seed % (1 << 64)

    @property
    def cramped(self) -> bool:
        """Whether it has more tokens than room."""
        return self.stretch is not None and len(self.tokens) > self.stretch.room

    @property
    def sampled(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def row(self) -> SamplingRow:
        """How the next token is drawn."""
        sampling = self.request.sampling
        seen = self.tokens if sampling.repetition_penalty != 1.0 else ()
        return SamplingRow(sampling, float(uniform(self.seed, len(self.logprobs))), seen)

    def append(self, token: int, logprob: float, raw: float, version: int) -> None:
        """Take a sampled token in, and see whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.raw_logprobs.append(raw)
        self.versions.append(version)
        if token in self.request.stop_ids or self._said_stop():
            self.finish = FinishReason.STOP
        elif len(self.logprobs) >= self.limit:
            self.finish = FinishReason.LENGTH

    def _said_stop(self) -> bool:
        """Whether a stop string is complete. A character may be spread over several tokens, and a token be empty."""
        stops = self.request.sampling.stop
        if not stops:
            return False
        last = min(len(self.logprobs), 4 * max(map(len, stops)) + 16)
        text = self._decode(self.tokens[-last:])
        return any(stop in text for stop in stops)

    @property
    def completion(self) -> Completion:
        assert self.finish is not None
        return Completion(self.sampled, self.logprobs, self.versions, self.finish, raw_logprobs=self.raw_logprobs)
