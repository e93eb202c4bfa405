"""Requests in the engine, and forward passes over some of them (`Batch`).

A request has its prompt and limits, its tokens while it has no row, and the task that awaits it. The state of running
requests is kept in tables with one row each, so that a step costs a few NumPy operations and not a Python loop over the
batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentfly.backends.base import Request, Tokens
from agentfly.backends.engine.prefix_cache import RadixNode
from agentfly.backends.engine.vision import RequestImages
from agentfly.errors import describe
from agentfly.types import Completion

Decode = Callable[[Sequence[int]], str]
Floats = npt.NDArray[np.float32]
_numbers = itertools.count()


class Sampled(NamedTuple):
    """Sampled tokens with their log-probabilities and weight versions."""

    tokens: Tokens
    logprobs: Floats
    raw_logprobs: Floats
    versions: Tokens


NOTHING_SAMPLED = Sampled(
    np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.int32)
)


class EngineRequest:
    """One turn while it is sampled."""

    def __init__(
        self,
        request: Request,
        prompt: Tokens,
        limit: int,
        decode: Decode = str,
        texts: dict[int, str] | None = None,
        images: RequestImages | None = None,
    ) -> None:
        """`limit`: most tokens to sample. `decode`: token ids to text, for stop strings. `texts`: a cache of single
        tokens' texts, shared by requests. `prompt`: image tokens are replaced by negative numbers, see `mark_images`.
        """
        self.images = images
        self.request = request
        self.prompt = prompt
        self.limit = limit
        self.number = next(_numbers)
        """Order of arrival."""
        seed = request.sampling.seed
        self.seed = secrets.randbits(64) if seed is None else seed % (1 << 64)
        self.row = -1
        """Its row of the scheduler's tables while it runs."""
        self.node: RadixNode | None = None
        """Last node of the prefix cache that it has locked; the tokens up to there have slots of the cache."""
        self.saved = NOTHING_SAMPLED
        """What was sampled before it was preempted."""
        self._decode = decode
        self._texts = {} if texts is None else texts

    @property
    def priority(self) -> tuple[int, int, int]:
        """Lowest first: as requested, then the least advanced chain, then the earliest request."""
        return self.request.priority, self.request.turn, self.number

    @property
    def tokens(self) -> Tokens:
        """The prompt, and what was sampled before it was preempted."""
        return np.concatenate([self.prompt, self.saved.tokens]) if len(self.saved.tokens) else self.prompt

    def contains_stop(self, sampled: Tokens) -> bool:
        """Whether the last of the sampled tokens completes a stop string.

        A character may be spread over several tokens, and a token may be empty. The text is decoded only if the last
        token can be the end of a stop string: it contains its last character or a part of one.
        """
        stops = self.request.sampling.stop
        token = int(sampled[-1])
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token, token])  # some tokenizers strip the first token's space
        if "\ufffd" not in text and not any(stop[-1] in text for stop in stops):
            return False
        # A character may take four tokens, one for each of its bytes.
        last = min(len(sampled), 4 * max(map(len, stops)) + 16)
        text = self._decode(sampled[-last:].tolist())
        return any(stop in text for stop in stops)


Update = Completion | Exception | list[int]
"""The end of a turn, or tokens sampled since the last update."""


class PendingRequest:
    """A request, and the future of the event loop that awaits it."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Completion] = self.loop.create_future()

    def apply(self, update: Update) -> None:
        """In the event loop: pass an update on. An `on_tokens` that raises fails its own turn with what it raised."""
        if self.future.done():
            return
        match update:
            case Completion():
                self.future.set_result(update)
            case Exception():
                self.future.set_exception(update)
            case ids:
                assert self.request.request.on_tokens is not None
                try:
                    self.request.request.on_tokens(ids)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:
                    # A future refuses StopIteration, and SystemExit would end the event loop of all requests.
                    fits = isinstance(error, Exception) and not isinstance(error, StopIteration)
                    self.future.set_exception(error if fits else RuntimeError(describe(error)))


def dispatch(updates: Sequence[tuple[PendingRequest, Update]]) -> None:
    """From the engine's thread: one call into each event loop, however many requests are updated."""

    def apply(loop_updates: Sequence[tuple[PendingRequest, Update]]) -> None:
        for pending, update in loop_updates:
            pending.apply(update)

    for loop in {pending.loop for pending, _ in updates}:
        loop_updates = [(pending, update) for pending, update in updates if pending.loop is loop]
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task awaits the result
            loop.call_soon_threadsafe(apply, loop_updates)


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Batch:
    """One forward pass: chunks of several requests, first those of one token that was sampled in an earlier step."""

    tables: RowTables
    requests: list[EngineRequest]
    rows: Ints
    """[chunk] row of the tables."""
    starts: Ints
    """[chunk] position of the first token."""
    counts: Ints
    """[chunk] number of tokens."""
    samples: Bools
    """[chunk] whether a token is sampled after the last one."""
    decodes: int
    """How many chunks are single tokens that the previous steps sampled."""
    generations: Ints
    """[chunk] which use of the row this is, to recognize results that arrive after their request has left."""

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class Output:
    """What a forward pass sampled, one entry for every chunk that samples."""

    tokens: npt.NDArray[np.int64]
    logprobs: Floats
    """Under the distribution that was sampled from."""
    raw_logprobs: Floats
    """Under the model's own."""


class RowTables:
    """The state of running requests, one row each."""

    def __init__(self, rows: int, context: int) -> None:
        """`context`: maximum number of tokens of a request, prompt and reply together."""
        self.rows = rows
        self.context = context
        self.tokens = np.empty((rows, context), np.int32)
        self.slots = np.empty((rows, context), np.int32)
        self.logprobs = np.empty((rows, context), np.float32)
        self.raw_logprobs = np.empty((rows, context), np.float32)
        self.versions = np.empty((rows, context), np.int32)
        self.prompt = np.zeros(rows, np.int64)
        """Tokens of the prompt."""
        self.received = np.zeros(rows, np.int64)
        """Tokens that the host knows."""
        self.length = np.zeros(rows, np.int64)
        """Tokens including the one that is being sampled."""
        self.computed = np.zeros(rows, np.int64)
        """Tokens whose keys and values are computed, or will be by the steps under way."""
        self.shared = np.zeros(rows, np.int64)
        """Tokens whose slots belong to the prefix cache."""
        self.reserved = np.zeros(rows, np.int64)
        """Tokens that have slots."""
        self.adjacent = np.zeros(rows, np.bool_)
        """Whether all slots of the row are adjacent and in order."""
        self.last = np.zeros(rows, np.int64)
        """The length at which the token limit is reached."""
        self.decoding = np.zeros(rows, np.bool_)
        """Whether the next token to compute is one that was sampled in this row."""
        self.generation = np.zeros(rows, np.int64)
        self.seed = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.watched = np.zeros(rows, np.bool_)
        """Whether every token is looked at: stop strings and token callbacks."""
        self.stop_ids = np.full((rows, 8), -1, np.int32)

    def copy_output(self, row: int) -> Sampled:
        """A copy of what was sampled in a row."""
        sampled = slice(int(self.prompt[row]), int(self.received[row]))
        return Sampled(
            self.tokens[row, sampled].copy(),
            self.logprobs[row, sampled].copy(),
            self.raw_logprobs[row, sampled].copy(),
            self.versions[row, sampled].copy(),
        )
