"""The record of one chain: stretches of tokens with one author each.

    Trajectory            frozen, born complete
     └─ Segment           append-only; at every turn exactly what the model was shown
         └─ Span          tokens of one author

The loss mask is who wrote the tokens, so it is derived and cannot disagree with them. With `P` the prompt, `A` what the
model sampled and `E` what an environment answered, a segment of two turns reads

    tokens   P0 + A0 + E0 + A1
    mask      0 +  1 +  0 +  1
"""

from __future__ import annotations

import enum
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from agentfly import recording
from agentfly.errors import RecordError
from agentfly.outcome import CallRecord, Failure, Score, StopReason, Treatment, Turn
from agentfly.types import Completion, Image, Message, Task

if TYPE_CHECKING:
    from rich.text import Text

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
    """What the tokens say."""
    logprobs: Floats | None = None
    """One for each token that the model sampled; None exactly where there is none."""
    weight_version: int | None = None
    """What the tokens were sampled with; None exactly where none were."""
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        sampled = self.author.trained and len(self.ids) > 0
        if sampled != (self.logprobs is not None) or sampled != (self.weight_version is not None):
            raise RecordError("sampled tokens, and no others, have log-probabilities and a weight version")
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise RecordError(f"{len(self.ids)} tokens were sampled but {len(self.logprobs)} log-probabilities came")
        self.ids.setflags(write=False)
        if self.logprobs is not None:
            self.logprobs.setflags(write=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Span):
            return NotImplemented
        mine, theirs = self._facts(), other._facts()
        return mine == theirs and np.array_equal(self.ids, other.ids) and _equal(self.logprobs, other.logprobs)

    def _facts(self) -> tuple[object, ...]:
        return self.author, self.turn, self.messages, self.weight_version, self.images

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"author": self.author.value, "turn": self.turn, "ids": self.ids.tolist()}
        if self.logprobs is not None:
            out["logprobs"] = self.logprobs.tolist()
            out["weight_version"] = self.weight_version
        if self.messages:
            out["messages"] = [recording.message_to_json(m) for m in self.messages]
        if self.images:
            out["images"] = [image.url for image in self.images]
        return out

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        logprobs = value.get("logprobs")
        return cls(
            Author(value["author"]),
            np.array(value["ids"], np.int32),
            value["turn"],
            tuple(recording.message_from_json(m) for m in value.get("messages", ())),
            None if logprobs is None else np.array(logprobs, np.float32),
            value.get("weight_version"),
            tuple(Image(url) for url in value.get("images", ())),
        )


class Segment:
    """What the model was shown, growing at its end only, until it is sealed.

    `show` and `sample` are the only ways in, and each adds tokens, author and log-probabilities at once.
    """

    __slots__ = ("_buffer", "_exact", "_images", "_sealed", "_spans")

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._buffer = array("i")
        self._sealed = False
        self._exact = True
        self._images: tuple[Image, ...] = ()

    def show(self, author: Author, ids: Sequence[int], messages: Sequence[Message] = (), *, turn: int) -> None:
        """Add what the model is shown and did not write."""
        if author.trained:
            raise RecordError("what the model wrote enters by `sample`, with its log-probabilities")
        images = tuple([image for message in messages for image in message.images])
        self._add(Span(author, np.array(ids, np.int32), turn, tuple(messages), images=images))

    def sample(self, completion: Completion, message: Message, *, turn: int) -> None:
        """Add what the model sampled: one span for each weight version it was sampled with."""
        ids, logprobs = np.array(completion.token_ids, np.int32), np.array(completion.logprobs, np.float32)
        if not len(ids):
            self._add(Span(Author.MODEL, ids, turn, (message,)))
            self._exact = self._exact and completion.message is None  # a server's message has tokens we never saw
            return
        ids.setflags(write=False)  # the spans are views of these
        logprobs.setflags(write=False)
        at = 0
        for version, count in _runs(completion.weight_versions):
            end = at + count
            says = (message,) if end == len(ids) else ()
            self._add(Span(Author.MODEL, ids[at:end], turn, says, logprobs[at:end], version))
            at = end

    def seal(self) -> Segment:
        """Close the segment for good. Its history is rewritten elsewhere, never here."""
        self._sealed = True
        self._buffer = array("i")
        return self

    def _add(self, span: Span) -> None:
        if self._sealed:
            raise RecordError("this segment is sealed; a rewritten history begins a new one")
        self._spans.append(span)
        self._buffer.frombytes(span.ids.tobytes())
        if span.images:
            self._images += span.images

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def exact(self) -> bool:
        """Whether the ids of everything the model was shown and sampled are known."""
        return self._exact

    @property
    def prompt(self) -> array[int]:
        """The ids so far, as a backend is sent them: a copy, since the segment grows on."""
        return array("i", self.tokens.tobytes()) if self._sealed else self._buffer[:]

    @property
    def last(self) -> int | None:
        """The id the segment ends with; None while it is empty."""
        ids = self.tokens if self._sealed else self._buffer
        return int(ids[-1]) if len(ids) else None

    @property
    def images(self) -> tuple[Image, ...]:
        """The pictures in the prompt, in order."""
        return self._images

    @property
    def tokens(self) -> Ids:
        return np.concatenate([span.ids for span in self._spans]) if self._spans else np.empty(0, np.int32)

    @property
    def mask(self) -> Mask:
        """True exactly on the tokens the model sampled."""
        return np.repeat([s.author.trained for s in self._spans], [len(s) for s in self._spans]).astype(np.bool_)

    @property
    def logprobs(self) -> Floats:
        """One number a token: the log-probability where the model sampled, 0 elsewhere."""
        parts = [np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in self._spans]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    @property
    def weight_versions(self) -> Ids:
        """One number a token: the version where the model sampled, -1 elsewhere."""
        versions = [-1 if s.weight_version is None else s.weight_version for s in self._spans]
        return np.repeat(np.array(versions, np.int32), [len(s) for s in self._spans])

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as the model saw it."""
        return tuple(message for span in self._spans for message in span.messages)

    def __len__(self) -> int:
        return sum(len(span) for span in self._spans) if self._sealed else len(self._buffer)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self._exact == other._exact and self._spans == other._spans

    __hash__ = None  # type: ignore[assignment]

    def to_json(self) -> dict[str, Any]:
        return {"exact": self._exact, "spans": [span.to_json() for span in self._spans]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Segment:
        segment = cls()
        for span in value["spans"]:
            segment._add(Span.from_json(span))
        segment._exact = value["exact"]
        return segment.seal()


def _equal(one: Floats | None, other: Floats | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def _runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """The weight versions in order, each with how many tokens it sampled in a row."""
    if versions.count(versions[0]) == len(versions):
        return [(versions[0], len(versions))]
    return [(version, len(list(run))) for version, run in groupby(versions)]


@dataclass(frozen=True, slots=True, repr=False)
class Trajectory:
    """The record of one finished chain."""

    task: Task
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    stop: StopReason
    prediction: str
    """The final answer: what the model said last, or what the tool that ended the chain answered."""
    group: int = 0
    """Which task of the run; the chains of one task form a group."""
    chain: int = 0
    """Which chain of the group."""
    score: Score | None = None
    """None when no reward was given, or none could be had."""
    treatment: Treatment = Treatment.TRAIN
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    attempts: int = 1

    def __repr__(self) -> str:
        reward = "" if self.score is None else f", reward {self.score.total:g}"
        return f"<Trajectory {self.id}: {self.stop.value} after {len(self.turns)} turns{reward}>"

    @property
    def id(self) -> str:
        return chain_id(self.group, self.chain)

    @property
    def reward(self) -> float | None:
        return None if self.score is None else self.score.total

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as the model saw it last."""
        return self.segments[-1].messages if self.segments else self.task.messages

    @property
    def calls(self) -> Iterator[CallRecord]:
        return (call for turn in self.turns for call in turn.calls)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s) for segment in self.segments for s in segment.spans if s.author.trained)

    @property
    def untrainable(self) -> str | None:
        """Why training must refuse this chain; None when it may be trained."""
        if all(segment.exact for segment in self.segments):
            return None
        return (
            f"chain {self.id} was sampled through a server that returned no token ids or log-probabilities; "
            "use one that returns them (vLLM does), or a backend that speaks tokens"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back to an equal trajectory."""
        return {
            "task": recording.task_to_json(self.task),
            "segments": [segment.to_json() for segment in self.segments],
            "turns": [recording.turn_to_json(turn) for turn in self.turns],
            "stop": self.stop.value,
            "prediction": self.prediction,
            "group": self.group,
            "chain": self.chain,
            "score": recording.score_to_json(self.score),
            "treatment": self.treatment.value,
            "failures": [recording.failure_to_json(failure) for failure in self.failures],
            "seconds": self.seconds,
            "attempts": self.attempts,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            task=recording.task_from_json(value["task"]),
            segments=tuple(map(Segment.from_json, value["segments"])),
            turns=tuple(map(recording.turn_from_json, value["turns"])),
            stop=StopReason(value["stop"]),
            prediction=value["prediction"],
            group=value["group"],
            chain=value["chain"],
            score=recording.score_from_json(value["score"]),
            treatment=Treatment(value["treatment"]),
            failures=tuple(map(recording.failure_from_json, value["failures"])),
            seconds=value["seconds"],
            attempts=value["attempts"],
        )

    def render(self, decode: Callable[[Sequence[int]], str] | None = None) -> Text:
        """Coloured text of who wrote what: the tokens where `decode` can read them, else the messages."""
        from rich.text import Text

        out = Text()
        for number, segment in enumerate(self.segments):
            if len(self.segments) > 1:
                out.append(f"── segment {number} ──\n", "dim")
            for span in segment.spans:
                if decode is not None and len(span):
                    out.append(decode(span.ids.tolist()), COLOURS[span.author])
                else:
                    out.append("".join(map(_said, span.messages)), COLOURS[span.author])
            out.append("\n")
        out.append(f"── {self.stop.value}", "dim")
        out.append("" if self.score is None else f", reward {self.score.total:g}", "bold")
        return out

    def __rich__(self) -> Text:
        return self.render()


def _said(message: Message) -> str:
    lines = [message.thinking, message.text, *("(picture)" for _ in message.images)]
    for call in message.tool_calls:
        unread = f" ({call.problem})" if call.problem else ""
        lines.append(f"→ {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}){unread}")
    return f"{message.role}: " + "\n".join(line for line in lines if line) + "\n"


def chain_id(group: int, chain: int) -> str:
    """How a chain is named in a run: the task's number and the chain's."""
    return f"{group}/{chain}"


COLOURS = {
    Author.TASK: "cyan",
    Author.MODEL: "bold green",
    Author.TOOL: "yellow",
    Author.USER: "magenta",
    Author.HISTORY: "blue",
    Author.TEMPLATE: "dim",
}
"""One colour an author, wherever chains are shown."""
