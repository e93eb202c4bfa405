"""What the learner is given to learn from, and how it is cut into pieces that fit into memory.

A sample is a sequence of tokens, some of which the model sampled: those, and no others, are learned from. With `P` the
prompt, `A` what was sampled and `E` what an environment answered, the model is shown all before the last sampled token,
and asked at the places before sampled ones:

    tokens   p0 p1 p2 a0 a1 e0 e1 a2 a3 e2
    shown    p0 p1 p2 a0 a1 e0 e1 a2
    asked          ^  ^        ^  ^
    for            a0 a1       a2 a3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from agentfly.algorithm import Piece
from agentfly.errors import RecordError
from agentfly.segment import Floats, Ids

T = TypeVar("T")


@dataclass(frozen=True)
class Sequences:
    """Tokens of some sequences, and which of them the model is asked for."""

    tokens: tuple[Ids, ...]
    """What each sequence shows the model: all before its last sampled token."""
    asked: tuple[Ids, ...]
    """For each, the places just before its sampled tokens."""
    targets: Ids
    """The sampled tokens of all, one after the other."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Sequences:
        sampled = [np.flatnonzero(piece.mask).astype(np.int32) for piece in pieces]
        if any(len(places) and places[0] == 0 for places in sampled):
            raise RecordError("the first token of a segment has nothing before it: the model cannot have sampled it")
        shown = [
            piece.tokens[: places[-1] if len(places) else 0] for piece, places in zip(pieces, sampled, strict=True)
        ]
        targets = [piece.tokens[places] for piece, places in zip(pieces, sampled, strict=True)]
        return cls(tuple(shown), tuple(places - 1 for places in sampled), np.concatenate(targets))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each sequence sampled."""
        return tuple(map(len, self.asked))


@dataclass(frozen=True)
class Sample:
    """A segment of a chain with what its tokens were worth: one number a token everywhere, 0 where none was sampled."""

    piece: Piece
    advantages: Floats
    temperature: float = 1.0
    """It was sampled with; 0 is greedy, whose log-probabilities are those of 1."""
    returns: Floats | None = None
    """What the critic should have said; None without one."""
    reference: Floats | None = None
    """Log-probabilities under the reference model; None without one."""
    old: Floats | None = None
    """Log-probabilities under the model before the update; None lets the learner find them where it needs them."""
    name: str = ""
    """For messages: group/chain#segment."""

    def __post_init__(self) -> None:
        for name in ("advantages", "returns", "reference", "old"):
            numbers = getattr(self, name)
            if numbers is not None and len(numbers) != len(self.piece.tokens):
                raise RecordError(
                    f"sample {self.name} has {len(self.piece.tokens)} tokens but {len(numbers)} {name}: one each"
                )

    @cached_property
    def sampled(self) -> int:
        """How many tokens the model wrote."""
        return int(self.piece.mask.sum())


def shown(piece: Piece) -> int:
    """How many tokens of a piece the model is shown: what comes after the last sampled one changes nothing."""
    places = np.flatnonzero(piece.mask)
    return int(places[-1]) if len(places) else 0


def micro_batches(
    items: Sequence[T], budget: int, length: Callable[[T], int], *, padded: bool = False
) -> list[list[T]]:
    """Batches of at most `budget` tokens, of items about as long as one another; an item alone may be longer.

    `padded`: every item takes as many tokens as the longest of its batch.
    """
    batches: list[list[T]] = []
    taken = longest = 0
    for item in sorted(items, key=length, reverse=True):
        tokens = length(item)
        if batches and (taken + longest if padded else taken + tokens) <= budget:
            batches[-1].append(item)
        else:
            batches.append([item])
            taken, longest = 0, tokens
        taken += longest if padded else tokens
    return batches


def mini_batches(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """At most `count` batches in order, as many items in each as in the others, or one more."""
    bounds = np.linspace(0, len(items), min(count, len(items)) + 1).astype(int)
    return [items[start:end] for start, end in pairwise(bounds)]
