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
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from agentfly.errors import RecordError
from agentfly.types import Completion, Finish, Image, Message, Task, ToolCall

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
    """One for each token, exactly where the model sampled."""
    weight_version: int | None = None
    """What the tokens were sampled with; None exactly where they were not sampled."""
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        sampled = self.author.trained
        if sampled != (self.logprobs is not None) or sampled != (self.weight_version is not None):
            raise RecordError(f"a span by {self.author.value} may have log-probabilities and a version only if sampled")
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise RecordError(f"{len(self.ids)} tokens were sampled but {len(self.logprobs)} log-probabilities came")
        self.ids.setflags(write=False)
        if self.logprobs is not None:
            self.logprobs.setflags(write=False)

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
            out["messages"] = [_message_to_json(m) for m in self.messages]
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
            tuple(_message_from_json(m) for m in value.get("messages", ())),
            None if logprobs is None else np.array(logprobs, np.float32),
            value.get("weight_version"),
            tuple(Image(url) for url in value.get("images", ())),
        )


class Segment:
    """What the model was shown, growing at its end only, until it is sealed.

    `show` and `sample` are the only ways in, and each adds tokens, author and log-probabilities at once.
    """

    __slots__ = ("_buffer", "_exact", "_sealed", "_spans", "images")

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._buffer = array("i")
        self._sealed = False
        self._exact = True
        self.images: tuple[Image, ...] = ()
        """The pictures in the prompt, in order."""

    def show(
        self, author: Author, ids: Sequence[int], messages: Sequence[Message] = (), *, turn: int
    ) -> None:
        """Add what the model is shown and did not write."""
        images = tuple([image for message in messages for image in message.images])
        self._add(Span(author, np.array(ids, np.int32), turn, tuple(messages), images=images))

    def sample(self, completion: Completion, message: Message, *, turn: int) -> None:
        """Add what the model sampled: one span for each weight version it was sampled with."""
        if not completion.token_ids:
            self._exact = False
            self._add(Span(Author.MODEL, np.empty(0, np.int32), turn, (message,), np.empty(0, np.float32), 0))
            return
        ids, logprobs = np.array(completion.token_ids, np.int32), np.array(completion.logprobs, np.float32)
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
            self.images += span.images

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
        return self._buffer[-1] if self._buffer else None

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
        return isinstance(other, Segment) and self.to_json() == other.to_json()

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


def _runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """The weight versions in order, each with how many tokens it sampled in a row."""
    if versions.count(versions[0]) == len(versions):
        return [(versions[0], len(versions))]
    return [(version, len(list(run))) for version, run in groupby(versions)]


class FailureKind(enum.Enum):
    """What broke."""

    ENVIRONMENT = "environment"
    TOOL = "tool"
    BACKEND = "backend"
    AGENT = "agent"
    REWARD = "reward"
    TIMEOUT = "timeout"
    TRUNCATION = "truncation"
    PARSE = "parse"
    CANCELLED = "cancelled"


class StopReason(enum.Enum):
    """Why a chain ended."""

    ANSWER = "answer"
    """The model gave its final answer."""
    TOOL_END = "tool_end"
    """A tool that ends the chain was called."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The chain's token budget is spent."""
    CONTEXT_LIMIT = "context_limit"
    """The next turn does not fit the context."""
    TRUNCATED = "truncated"
    """A turn was cut at its token limit before it said anything to act on."""
    NO_CALL = "no_call"
    """The model went on without calling a tool, past the limit."""
    INVALID_CALL = "invalid_call"
    """The model's calls could not be run, past the limit."""
    TOOL_FAULT = "tool_fault"
    ENVIRONMENT_FAULT = "environment_fault"
    BACKEND_FAULT = "backend_fault"
    AGENT_FAULT = "agent_fault"
    """The agent's own code raised."""
    TIMEOUT = "timeout"
    """The chain's wall-clock limit passed."""
    CANCELLED = "cancelled"

    @property
    def failure(self) -> FailureKind | None:
        """The kind of failure this end is; None when the chain ended as chains do."""
        return _FAILURES.get(self)


_FAILURES = {
    StopReason.TOOL_FAULT: FailureKind.TOOL,
    StopReason.ENVIRONMENT_FAULT: FailureKind.ENVIRONMENT,
    StopReason.BACKEND_FAULT: FailureKind.BACKEND,
    StopReason.AGENT_FAULT: FailureKind.AGENT,
    StopReason.TIMEOUT: FailureKind.TIMEOUT,
    StopReason.CONTEXT_LIMIT: FailureKind.TRUNCATION,
    StopReason.MAX_TOKENS: FailureKind.TRUNCATION,
    StopReason.TRUNCATED: FailureKind.TRUNCATION,
    StopReason.INVALID_CALL: FailureKind.PARSE,
    StopReason.CANCELLED: FailureKind.CANCELLED,
}


class Treatment(enum.Enum):
    """What training makes of a chain, decided by the failure policy when it ended."""

    TRAIN = "train"
    MASK = "mask"
    """Carries no loss and counts in no baseline."""
    ZERO = "zero"
    """Trained with reward 0."""
    DROP_GROUP = "drop_group"
    """Takes its whole group out of the batch."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that went wrong in a chain, whether or not the chain survived it."""

    kind: FailureKind
    message: str
    turn: int
    attempt: int = 0
    """0 is the first try; a retried chain keeps the failures of its earlier attempts."""


class CallStatus(enum.Enum):
    """How a tool call went."""

    OK = "ok"
    ERROR = "error"
    """The tool's own code failed or ran out of time."""
    INVALID = "invalid"
    """The call could not be run: unreadable, or arguments that do not fit."""
    UNKNOWN = "unknown"
    """No such tool: the model made the name up."""
    SKIPPED = "skipped"
    """An earlier call of the same turn ended the chain."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One tool call of a turn and how it went; what it answered is in the messages."""

    name: str
    status: CallStatus
    seconds: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the tool returned beside its observation."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply of the model and what came of it."""

    finish: Finish
    calls: tuple[CallRecord, ...] = ()
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Score:
    """What a chain earned."""

    total: float
    per_turn: tuple[float, ...] | None = None
    """One number a turn, where the reward gave them; None: only the total is known."""
    metrics: Mapping[str, Any] = field(default_factory=dict)


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
        out = {
            "task": _task_to_json(self.task),
            "segments": [segment.to_json() for segment in self.segments],
            "turns": [_turn_to_json(turn) for turn in self.turns],
            "stop": self.stop.value,
            "prediction": self.prediction,
            "group": self.group,
            "chain": self.chain,
            "score": None if self.score is None else _score_to_json(self.score),
            "treatment": self.treatment.value,
            "failures": [[f.kind.value, f.message, f.turn, f.attempt] for f in self.failures],
            "seconds": self.seconds,
            "attempts": self.attempts,
        }
        _refuse_what_json_loses(out["task"]["columns"], f"column of task {self.task.id or self.group}")
        for call in self.calls:
            _refuse_what_json_loses(call.info, f"info of tool {call.name}")
        if self.score is not None:
            _refuse_what_json_loses(self.score.metrics, "metric of the reward")
        return out

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        task, score = value["task"], value["score"]
        return cls(
            task=Task(tuple(map(_message_from_json, task["messages"])), task["columns"], task["id"]),
            segments=tuple(map(Segment.from_json, value["segments"])),
            turns=tuple(map(_turn_from_json, value["turns"])),
            stop=StopReason(value["stop"]),
            prediction=value["prediction"],
            group=value["group"],
            chain=value["chain"],
            score=None if score is None else _score_from_json(score),
            treatment=Treatment(value["treatment"]),
            failures=tuple(Failure(FailureKind(kind), *rest) for kind, *rest in value["failures"]),
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
                    out.append("".join(f"{m.role}: {m.text}\n" for m in span.messages), COLOURS[span.author])
            out.append("\n")
        out.append(f"── {self.stop.value}", "dim")
        out.append("" if self.score is None else f", reward {self.score.total:g}", "bold")
        return out


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


def _refuse_what_json_loses(values: Mapping[str, Any], what: str) -> None:
    for name, value in values.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise RecordError(
                f"{what}: {name!r} holds a {type(value).__name__} that JSON cannot keep as it is; "
                "use text, numbers, lists and dicts with text keys"
            )


def _message_to_json(message: Message) -> dict[str, Any]:
    out = message.to_dict()
    if not isinstance(message.content, str):
        out["content"] = [p if isinstance(p, str) else {"image": p.url} for p in message.content]
    if message.tool_calls:
        out["tool_calls"] = [[c.name, dict(c.arguments), c.id, c.problem, c.raw] for c in message.tool_calls]
    return out


def _message_from_json(value: Mapping[str, Any]) -> Message:
    content = value["content"]
    if not isinstance(content, str):
        content = tuple(p if isinstance(p, str) else Image(p["image"]) for p in content)
    return Message(
        value["role"],
        content,
        tuple(ToolCall(*call) for call in value.get("tool_calls", ())),
        value.get("reasoning_content", ""),
        value.get("name", ""),
        value.get("tool_call_id", ""),
    )


def _task_to_json(task: Task) -> dict[str, Any]:
    return {"messages": [_message_to_json(m) for m in task.messages], "columns": dict(task.columns), "id": task.id}


def _turn_to_json(turn: Turn) -> list[Any]:
    calls = [[c.name, c.status.value, c.seconds, dict(c.info)] for c in turn.calls]
    return [turn.finish.value, calls, turn.generate_seconds, turn.tool_seconds]


def _turn_from_json(value: Sequence[Any]) -> Turn:
    finish, calls, generate_seconds, tool_seconds = value
    records = tuple(CallRecord(name, CallStatus(status), *rest) for name, status, *rest in calls)
    return Turn(Finish(finish), records, generate_seconds, tool_seconds)


def _score_to_json(score: Score) -> list[Any]:
    return [score.total, None if score.per_turn is None else list(score.per_turn), dict(score.metrics)]


def _score_from_json(value: Sequence[Any]) -> Score:
    total, per_turn, metrics = value
    return Score(total, None if per_turn is None else tuple(per_turn), metrics)
