"""The state of running requests, and a forward pass over some of them.

The state is kept in tables with one row per request, so that a step costs a few NumPy operations and not a Python loop
over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agentfly.backends.engine.request import EngineRequest, Floats, Sampled

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
        """`context`: most tokens of a request, prompt and sampled."""
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
        part = slice(int(self.prompt[row]), int(self.received[row]))
        return Sampled(
            self.tokens[row, part].copy(),
            self.logprobs[row, part].copy(),
            self.raw_logprobs[row, part].copy(),
            self.versions[row, part].copy(),
        )
