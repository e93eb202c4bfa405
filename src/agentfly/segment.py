"""Tokens of a chain: spans of one author each, in segments that only grow.

The loss mask follows from the author of each token, so it is derived and cannot disagree with the tokens. With `P` the
prompt, `A` what the model sampled and `E` what an environment answered, a segment of two turns reads

    tokens   P0 + A0 + E0 + A1
    mask      0 +  1 +  0 +  1
"""

from __future__ import annotations

import enum
import json
import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from agentfly.errors import RecordError
from agentfly.types import Completion, Image, Message, ToolCall

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


class Author(enum.Enum):
    """Who wrote a span."""

    TASK = "task"
    """The prompt of a chain: system text, tool descriptions, the question."""
    MODEL = "model"
    TOOL = "tool"
    """An observation, with the text the template puts around it."""
    USER = "user"
    """A later user message: a nudge, or a simulated user."""
    HISTORY = "history"
    """The rewritten history that opens a later segment; model text in it is trained where it was sampled."""
    TEMPLATE = "template"
    """Template text alone: the closing token of a turn that was cut off."""

    carries_loss: bool
    """Whether these tokens carry loss: only the model's own do. An attribute, since it is read for every span."""

    def __init__(self, value: str) -> None:
        self.carries_loss = value == "model"

    @property
    def loss_rule(self) -> str:
        """Why these tokens carry loss or do not, as a sentence."""
        return _LOSS_RULES[self]


_LOSS_RULES = {
    Author.TASK: "Prompt tokens are given, not sampled: they carry no loss.",
    Author.MODEL: "The model sampled these tokens: they carry loss.",
    Author.TOOL: "The environment or a tool wrote this observation: it carries no loss.",
    Author.USER: "A later user message is given, not sampled: it carries no loss.",
    Author.HISTORY: (
        "The rewritten history opens a new segment and carries no loss: model text in it is trained in the segment "
        "where it was sampled."
    ),
    Author.TEMPLATE: "The chat template added these tokens, not the model: they carry no loss.",
}
"""Per author: why its tokens carry loss or do not."""


AUTHOR_COLORS = {
    Author.TASK: "cyan",
    Author.MODEL: "bold green",
    Author.TOOL: "yellow",
    Author.USER: "magenta",
    Author.HISTORY: "blue",
    Author.TEMPLATE: "dim",
}
"""One color per author, wherever chains are shown."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Tokens of one author, one turn and, where sampled, one weight version."""

    author: Author
    ids: Ids
    turn: int
    messages: tuple[Message, ...] = ()
    """The messages that the tokens encode. A message without tokens was never shown to the model."""
    logprobs: Floats | None = None
    """One per sampled token; None if nothing was sampled."""
    weight_version: int | None = None
    """The weights that sampled the tokens; None if nothing was sampled."""

    def __post_init__(self) -> None:
        sampled = len(self.ids) if self.author.carries_loss else 0
        num_logprobs = 0 if self.logprobs is None else len(self.logprobs)
        if num_logprobs != sampled or (self.weight_version is not None) != (sampled > 0):
            raise RecordError("sampled tokens, and no others, have a log-probability each and a weight version")
        self.ids.setflags(write=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields that are set."""
        logprobs = None if self.logprobs is None else self.logprobs.tolist()
        return _span_to_json(self.author, self.ids.tolist(), self.turn, self.messages, logprobs, self.weight_version)


def _span_to_json(
    author: Author,
    ids: list[int],
    turn: int,
    messages: tuple[Message, ...],
    logprobs: list[float] | None,
    weight_version: int | None,
) -> dict[str, Any]:
    out: dict[str, Any] = {"author": author.value, "turn": turn, "ids": ids}
    if logprobs is not None:
        out["logprobs"] = logprobs
        out["weight_version"] = weight_version
    if messages:
        out["messages"] = [message_to_json(m) for m in messages]
    return out


_SpanEnd = tuple[Author, int, int, tuple[Message, ...], int | None]
"""A span as the segment stores it: author, end offset, turn, messages, weight version."""


class Segment:
    """The tokens the model was shown and sampled. Grows at its end only, until it is sealed.

    `append` and `append_completion` are the only ways in; each adds tokens, author and log-probabilities together.
    """

    __slots__ = ("_exact", "_ids", "_images", "_logprobs", "_sealed", "_spans", "image_token_id")

    def __init__(self, image_token_id: int | None = None) -> None:
        """`image_token_id`: the token that is replaced by a feature of an image; None if the model takes no images."""
        self.image_token_id = image_token_id
        self._ids = array("i")
        self._logprobs = array("f")
        """Of the sampled tokens only, in order."""
        self._spans: list[_SpanEnd] = []
        self._images: tuple[Image, ...] = ()
        self._exact = True
        self._sealed = False

    def append(self, author: Author, ids: Sequence[int], messages: Sequence[Message] = (), *, turn: int) -> None:
        """Add tokens that the model is shown and did not write."""
        if author.carries_loss:
            raise RecordError("what the model wrote enters by `append_completion`, with its log-probabilities")
        self._extend_ids(array("i", ids))
        self._spans.append((author, len(self._ids), turn, tuple(messages), None))
        for message in messages:
            if not isinstance(message.content, str):
                self._images += message.images

    def append_completion(self, completion: Completion, message: Message, *, turn: int) -> None:
        """Add tokens that the model sampled: one span per weight version."""
        ids = array("i", completion.token_ids)
        logprobs = array("f", completion.logprobs)
        versions = completion.weight_versions
        if not len(ids) == len(logprobs) == len(versions):
            raise RecordError(f"{len(ids)} tokens were sampled but {len(logprobs)} log-probabilities came")
        end = len(self._ids)
        self._extend_ids(ids)
        self._logprobs += logprobs
        if not ids:
            self._spans.append((Author.MODEL, end, turn, (message,), None))
            self._exact = self._exact and completion.message is None  # a server's message has tokens we never saw
            return
        if versions.count(versions[0]) == len(versions):  # the usual case, without groupby
            runs = [(versions[0], len(versions))]
        else:
            runs = [(version, len(list(run))) for version, run in groupby(versions)]
        for version, count in runs:
            end += count
            self._spans.append((Author.MODEL, end, turn, (message,) if end == len(self._ids) else (), version))

    def _extend_ids(self, ids: array[int]) -> None:
        if self._sealed:
            raise RecordError("this segment is sealed; a rewritten history begins a new one")
        self._ids += ids

    def copy(self) -> Segment:
        """A copy that grows on its own, with the same tokens so far."""
        other = Segment(self.image_token_id)
        other._ids = self._ids[:]
        other._logprobs = self._logprobs[:]
        other._spans = list(self._spans)
        other._images = self._images
        other._exact = self._exact
        return other

    def seal(self) -> Segment:
        """Close the segment. A rewritten history goes into a new segment, never into this one."""
        if not self._sealed:
            self._sealed = True
            self._ids = self._ids[:]  # a copy without spare capacity
            self._logprobs = self._logprobs[:]
        return self

    @property
    def exact(self) -> bool:
        """Whether the ids of everything the model was shown and sampled are known."""
        return self._exact

    @property
    def prompt(self) -> array[int]:
        """The ids so far, as sent to a backend: a copy, since the segment keeps growing."""
        return self._ids[:]

    def extend_prompt(self, added: Sequence[int], end: int) -> array[int]:
        """The first `end` ids with the next ones, copied once: a long copy costs more than the rest of a turn."""
        prefix = self._ids if end == len(self._ids) else self._ids[:end]
        return prefix + array("i", added)

    def id_at(self, index: int) -> int:
        """The id at a position; all ids are in `tokens`, which copies them."""
        return self._ids[index]

    @property
    def last_id(self) -> int | None:
        """The last id; None while the segment is empty."""
        return self._ids[-1] if self._ids else None

    @property
    def images(self) -> tuple[Image, ...]:
        """The images in the prompt, in order."""
        return self._images

    @property
    def image_positions(self) -> Ids:
        """[features] The positions of the images' tokens, in the order of the images.

        A token that the model sampled is never part of an image, and the template encodes no other text to this token.
        """
        if self.image_token_id is None or not self._images:
            return np.empty(0, np.int32)
        return np.flatnonzero((self.tokens == self.image_token_id) & ~self.mask).astype(np.int32)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans in order. Their arrays are read-only."""
        ids = self.tokens
        logprobs = np.array(self._logprobs, np.float32)
        ids.setflags(write=False)
        logprobs.setflags(write=False)
        out: list[Span] = []
        start = sampled = 0
        for author, end, turn, messages, version in self._spans:
            span_logprobs = None if version is None else logprobs[sampled : sampled + end - start]
            out.append(Span(author, ids[start:end], turn, messages, span_logprobs, version))
            sampled += 0 if span_logprobs is None else len(span_logprobs)
            start = end
        return tuple(out)

    @property
    def tokens(self) -> Ids:
        return np.array(self._ids, np.int32)

    @property
    def mask(self) -> Mask:
        """[tokens] True exactly on the tokens the model sampled."""
        return self._per_token(np.array([author.carries_loss for author, *_ in self._spans], np.bool_))

    @property
    def observation_mask(self) -> Mask:
        """[tokens] True on what tools answered, with the template's text around it, and not on the tokens of images."""
        mask = self._per_token(np.array([author is Author.TOOL for author, *_ in self._spans], np.bool_))
        mask[self.image_positions] = False
        return mask

    @property
    def logprobs(self) -> Floats:
        """[tokens] The log-probability where the model sampled, 0 elsewhere."""
        out = np.zeros(len(self), np.float32)
        out[self.mask] = self._logprobs
        return out

    @property
    def weight_versions(self) -> Ids:
        """[tokens] The weight version where the model sampled, -1 elsewhere."""
        versions = [-1 if version is None else version for *_, version in self._spans]
        return self._per_token(np.array(versions, np.int32))

    @property
    def turns(self) -> Ids:
        """[tokens] The turn that each token belongs to."""
        return self._per_token(np.array([turn for _, _, turn, *_ in self._spans], np.int32))

    @property
    def tokens_by_author(self) -> Counter[Author]:
        """Number of tokens of each author."""
        counts: Counter[Author] = Counter()
        start = 0
        for author, end, *_ in self._spans:
            counts[author] += end - start
            start = end
        return counts

    def _per_token(self, per_span: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.repeat(per_span, np.diff([0, *(end for _, end, *_ in self._spans)]))

    @property
    def num_sampled_tokens(self) -> int:
        """How many tokens the model sampled."""
        return len(self._logprobs)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation, as messages."""
        return tuple(message for _, _, _, messages, _ in self._spans for message in messages)

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and (self._exact, self._ids, self._logprobs, self._spans) == (
            other._exact, other._ids, other._logprobs, other._spans,
        )  # fmt: skip

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        ids = self._ids.tolist()
        logprobs = self._logprobs.tolist()
        spans = []
        start = sampled = 0
        # From slices of one list: each `Span` would have an array, made only to be converted.
        for author, end, turn, messages, version in self._spans:
            span_logprobs = None
            if version is not None:
                span_logprobs = logprobs[sampled : sampled + end - start]
                sampled += end - start
            spans.append(_span_to_json(author, ids[start:end], turn, messages, span_logprobs, version))
            start = end
        out = {"exact": self._exact, "spans": spans}
        return out if self.image_token_id is None else {**out, "image_token_id": self.image_token_id}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Segment:
        """Read the object that `to_json` returns. The segment is sealed."""
        segment = cls(value.get("image_token_id"))
        for span in value["spans"]:
            messages = tuple(message_from_json(m) for m in span.get("messages", ()))
            author = Author(span["author"])
            segment._extend_ids(array("i", span["ids"]))
            segment._logprobs.extend(span.get("logprobs", ()))
            segment._spans.append((author, len(segment), span["turn"], messages, span.get("weight_version")))
            segment._images += () if author.carries_loss else tuple(i for m in messages for i in m.images)
        if segment.num_sampled_tokens != int(segment.mask.sum()):
            raise RecordError("sampled tokens, and no others, have log-probabilities and a weight version")
        segment._exact = value["exact"]
        return segment.seal()


def message_to_json(message: Message) -> dict[str, Any]:
    out = message.to_dict()
    if not isinstance(message.content, str):
        out["content"] = [piece if isinstance(piece, str) else {"image": piece.url} for piece in message.content]
    if message.tool_calls:
        out["tool_calls"] = []
        for call in message.tool_calls:
            arguments = require_json(call.arguments, f"arguments of a call of {call.name!r}")
            stored = {"name": call.name, "arguments": arguments, "id": call.id}
            failure = {"problem": call.problem, "raw": call.raw}
            out["tool_calls"].append({**stored, **{name: text for name, text in failure.items() if text}})
    return out


def message_from_json(value: Mapping[str, Any]) -> Message:
    content = value["content"]
    if not isinstance(content, str):
        content = tuple(piece if isinstance(piece, str) else Image(piece["image"]) for piece in content)
    return Message(
        role=value["role"],
        content=content,
        tool_calls=tuple(ToolCall(**call) for call in value.get("tool_calls", ())),
        thinking=value.get("reasoning_content", ""),
        name=value.get("name", ""),
        tool_call_id=value.get("tool_call_id", ""),
    )


def to_plain(value: Any) -> Any:
    """Convert arrays and NumPy scalars to lists and numbers, tuples to lists, NaN and infinity to None, recursively.

    JSON has neither of the latter, and a chain must not be lost for one number beside its reward. Other values stay as
    they are, for the user to inspect; `require_json` rejects them by name.
    """
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_json(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the values in the plain types of JSON if it reproduces them; RecordError names the first it would change.

    A value of a derived type, such as an enum of texts, equals its plain form, but encoders may write it in another.
    """
    out: dict[str, Any] = {}
    for name, value in values.items():
        if type(name) is str and type(value) in (str, bool):  # the usual case, without encoding it
            out[name] = value
            continue
        try:
            out[name] = json.loads(json.dumps(value, allow_nan=False))
            same = isinstance(name, str) and out[name] == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise RecordError(
                f"{what}: {name!r} holds a {type(value).__name__} that JSON cannot keep as it is; "
                "use text, finite numbers, lists and dicts with text keys"
            )
    return out
