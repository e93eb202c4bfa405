"""The tokens of a chain: stretches of one author each, in a buffer that only grows.

The loss mask is who wrote the tokens, so it is derived and cannot disagree with them. With `P` the prompt, `A` what the
model sampled and `E` what an environment answered, a segment of two turns reads

    tokens   P0 + A0 + E0 + A1
    mask      0 +  1 +  0 +  1
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly import recording
from agentfly.errors import RecordError
from agentfly.types import Completion, Image, Message

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


class Author(enum.Enum):
    """Who wrote a span."""

    TASK = "task"
    """The prompt of a chain: system text, tool descriptions, the question."""
    MODEL = "model"
    TOOL = "tool"
    """A tool's answer, with the scaffolding the template puts around it."""
    USER = "user"
    """A message that came in later: a nudge, or a simulated user."""
    HISTORY = "history"
    """The rewritten history that opens a later segment; what the model said in it was trained where it was sampled."""
    TEMPLATE = "template"
    """Scaffolding alone: the closing token of a turn that was cut off."""

    @property
    def trained(self) -> bool:
        """Only the model's own tokens carry loss."""
        return self is Author.MODEL


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens of one author, one turn and, where sampled, one weight version."""

    author: Author
    ids: Ids
    turn: int
    messages: tuple[Message, ...] = ()
    """What the tokens say. A message without tokens was said, and never shown to the model."""
    logprobs: Floats | None = None
    """One for each token that the model sampled; None exactly where there is none."""
    weight_version: int | None = None
    """What the tokens were sampled with; None exactly where none were."""

    def __post_init__(self) -> None:
        sampled = len(self.ids) if self.author.trained else 0
        given = 0 if self.logprobs is None else len(self.logprobs)
        if given != sampled or (self.weight_version is not None) != (sampled > 0):
            raise RecordError("sampled tokens, and no others, have a log-probability each and a weight version")
        self.ids.setflags(write=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"author": self.author.value, "turn": self.turn, "ids": self.ids.tolist()}
        if self.logprobs is not None:
            out["logprobs"] = self.logprobs.tolist()
            out["weight_version"] = self.weight_version
        if self.messages:
            out["messages"] = [recording.message_to_json(m) for m in self.messages]
        return out


_Mark = tuple[Author, int, int, tuple[Message, ...], int | None]
"""Where a span ends: its author, the end, the turn, its messages, and its weight version."""


class Segment:
    """What the model was shown, growing at its end only, until it is sealed.

    `show` and `sample` are the only ways in, and each adds tokens, author and log-probabilities at once, or nothing.
    """

    __slots__ = ("_exact", "_ids", "_images", "_logprobs", "_marks", "_sealed")

    def __init__(self) -> None:
        self._ids = array("i")
        self._logprobs = array("f")
        """Of the sampled tokens only, in order."""
        self._marks: list[_Mark] = []
        self._images: tuple[Image, ...] = ()
        self._exact = True
        self._sealed = False

    def show(self, author: Author, ids: Sequence[int], messages: Sequence[Message] = (), *, turn: int) -> None:
        """Add what the model is shown and did not write."""
        if author.trained:
            raise RecordError("what the model wrote enters by `sample`, with its log-probabilities")
        self._add(array("i", ids))
        self._marks.append((author, len(self._ids), turn, tuple(messages), None))
        for message in messages:
            if not isinstance(message.content, str):
                self._images += message.images

    def sample(self, completion: Completion, message: Message, *, turn: int) -> None:
        """Add what the model sampled: one span for each weight version it was sampled with."""
        ids, logprobs = array("i", completion.token_ids), array("f", completion.logprobs)
        if not len(ids) == len(logprobs) == len(completion.weight_versions):
            raise RecordError(f"{len(ids)} tokens were sampled but {len(logprobs)} log-probabilities came")
        end = len(self._ids)
        self._add(ids)
        self._logprobs += logprobs
        if not ids:
            self._marks.append((Author.MODEL, end, turn, (message,), None))
            self._exact = self._exact and completion.message is None  # a server's message has tokens we never saw
            return
        for version, count in _runs(completion.weight_versions):
            end += count
            self._marks.append((Author.MODEL, end, turn, (message,) if end == len(self._ids) else (), version))

    def _add(self, ids: array[int]) -> None:
        if self._sealed:
            raise RecordError("this segment is sealed; a rewritten history begins a new one")
        self._ids += ids

    def seal(self) -> Segment:
        """Close the segment for good. Its history is rewritten elsewhere, never here."""
        if not self._sealed:
            self._sealed = True
            self._ids, self._logprobs = self._ids[:], self._logprobs[:]  # without the room to grow
        return self

    @property
    def exact(self) -> bool:
        """Whether the ids of everything the model was shown and sampled are known."""
        return self._exact

    @property
    def prompt(self) -> array[int]:
        """The ids so far, as a backend is sent them: a copy, since the segment grows on."""
        return self._ids[:]

    @property
    def last(self) -> int | None:
        """The id the segment ends with; None while it is empty."""
        return self._ids[-1] if self._ids else None

    @property
    def images(self) -> tuple[Image, ...]:
        """The pictures in the prompt, in order."""
        return self._images

    @property
    def spans(self) -> tuple[Span, ...]:
        """The stretches in order. Their arrays are read-only."""
        ids, logprobs = self.tokens, np.array(self._logprobs, np.float32)
        ids.setflags(write=False)
        logprobs.setflags(write=False)
        out: list[Span] = []
        at = sampled = 0
        for author, end, turn, messages, version in self._marks:
            theirs = None if version is None else logprobs[sampled : sampled + end - at]
            out.append(Span(author, ids[at:end], turn, messages, theirs, version))
            sampled += 0 if theirs is None else len(theirs)
            at = end
        return tuple(out)

    @property
    def tokens(self) -> Ids:
        return np.array(self._ids, np.int32)

    @property
    def mask(self) -> Mask:
        """True exactly on the tokens the model sampled."""
        return self._each_token(np.array([author.trained for author, *_ in self._marks], np.bool_))

    @property
    def logprobs(self) -> Floats:
        """One number a token: the log-probability where the model sampled, 0 elsewhere."""
        out = np.zeros(len(self), np.float32)
        out[self.mask] = self._logprobs
        return out

    @property
    def weight_versions(self) -> Ids:
        """One number a token: the version where the model sampled, -1 elsewhere."""
        versions = [-1 if version is None else version for *_, version in self._marks]
        return self._each_token(np.array(versions, np.int32))

    def _each_token(self, of_spans: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A value a span, repeated for each of its tokens."""
        return np.repeat(of_spans, np.diff([0, *(end for _, end, *_ in self._marks)]))

    @property
    def sampled(self) -> int:
        """How many tokens the model wrote."""
        return len(self._logprobs)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, as messages."""
        return tuple(message for _, _, _, messages, _ in self._marks for message in messages)

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self._facts() == other._facts()

    def _facts(self) -> tuple[object, ...]:
        return self._exact, self._ids, self._logprobs, self._marks

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        return {"exact": self._exact, "spans": [span.to_json() for span in self.spans]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Segment:
        segment = cls()
        for span in value["spans"]:
            messages = tuple(recording.message_from_json(m) for m in span.get("messages", ()))
            author, version = Author(span["author"]), span.get("weight_version")
            segment._add(array("i", span["ids"]))
            segment._logprobs.extend(span.get("logprobs", ()))
            segment._marks.append((author, len(segment), span["turn"], messages, version))
            segment._images += () if author.trained else tuple(i for m in messages for i in m.images)
        if segment.sampled != int(segment.mask.sum()):
            raise RecordError("sampled tokens, and no others, have log-probabilities and a weight version")
        segment._exact = value["exact"]
        return segment.seal()


def _runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """The weight versions in order, each with how many tokens it sampled in a row."""
    first = versions[0]
    if versions.count(first) == len(versions):
        return [(first, len(versions))]
    return [(version, len(list(run))) for version, run in groupby(versions)]
