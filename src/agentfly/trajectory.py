"""The record of one finished chain, and its JSON round trip.

Trajectory            frozen, complete when it is created: task, segments, turns, stop reason, score, failures
 └─ Segment           append-only; at every turn exactly the tokens the model was shown
     └─ Span          tokens of one author, one turn and, where sampled, one weight version
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from agentfly.errors import RecordError
from agentfly.segment import AUTHOR_COLORS, Author, Segment, message_from_json, message_to_json, require_json
from agentfly.types import FinishReason, Image, Message, Task

if TYPE_CHECKING:
    from rich.text import Text


class FailureKind(enum.Enum):
    """The component that failed."""

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
    """The chain's token budget is used up."""
    CONTEXT_LIMIT = "context_limit"
    """The next turn does not fit the context."""
    TRUNCATED = "truncated"
    """A turn was cut at its token limit before it contained a call or an answer."""
    NO_CALL = "no_call"
    """More replies without a tool call than the limit allows."""
    INVALID_CALL = "invalid_call"
    """More replies with invalid calls than the limit allows."""
    REPEATED_CALL = "repeated_call"
    """More replies that only repeat earlier calls than the limit allows. Not a failure: the chain is scored."""
    TOOL_FAULT = "tool_fault"
    TOOL_TIMEOUT = "tool_timeout"
    """A call exceeded its tool's time limit and its environment is still busy, or more calls did than the limit
    allows. The model chose the call, so this is not a failure: the chain is scored and trained."""
    ENVIRONMENT_FAULT = "environment_fault"
    BACKEND_FAULT = "backend_fault"
    AGENT_FAULT = "agent_fault"
    """The agent's own code raised."""
    TIMEOUT = "timeout"
    """The chain's wall-clock limit passed."""
    CANCELLED = "cancelled"

    @property
    def failure(self) -> FailureKind | None:
        """The kind of failure; None for a regular end."""
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


class TrainingTreatment(enum.Enum):
    """How training treats a chain; the failure policy decides when the chain ends."""

    TRAIN = "train"
    MASK = "mask"
    """No loss, and excluded from the baseline."""
    ZERO = "zero"
    """Trained with reward 0."""
    DROP_GROUP = "drop_group"
    """The whole group is removed from the batch."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure in a chain, whether or not the chain survived it."""

    kind: FailureKind
    message: str
    turn: int
    attempt: int = 0
    """0 is the first attempt; a retried chain keeps the failures of its earlier attempts."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Values and metrics of the other rewards, if one of several failed."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        out = {"kind": self.kind.value, "message": self.message, "turn": self.turn, "attempt": self.attempt}
        return {**out, "metrics": require_json(self.metrics, "metrics of the reward")} if self.metrics else out

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the object that `to_json` returns."""
        return cls(**{**value, "kind": FailureKind(value["kind"])})


class CallStatus(enum.Enum):
    """The outcome of a tool call."""

    OK = "ok"
    ERROR = "error"
    """The tool's own code failed."""
    TIMEOUT = "timeout"
    """The call exceeded the tool's time limit."""
    INVALID = "invalid"
    """The call could not be run: unreadable, or arguments that do not fit the schema."""
    UNKNOWN = "unknown"
    """There is no tool of this name."""
    SKIPPED = "skipped"
    """An earlier call of the same turn ended the chain."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One tool call of a turn and its outcome; the observation is in the messages."""

    name: str
    status: CallStatus
    seconds: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    """What the tool returned besides its observation."""
    retries: int = 0
    """Failed attempts before this one."""
    blocked: float = 0.0
    """Seconds in which the tool blocked the event loop, and with it all other chains."""
    action: str = ""
    """A digest of name and arguments, which is the same for equal calls."""
    repeated: bool = False
    """Whether the same call got the same observation before in the chain."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads. It is stored for every call, so what is empty or zero is left out."""
        details = {
            "info": require_json(self.info, f"info of tool {self.name!r}"),
            "retries": self.retries,
            "blocked": self.blocked,
            "action": self.action,
            "repeated": self.repeated,
        }
        out = {"name": self.name, "status": self.status.value, "seconds": self.seconds}
        return {**out, **{name: value for name, value in details.items() if value}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the object that `to_json` returns."""
        return cls(**{**value, "status": CallStatus(value["status"])})


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One reply of the model and the outcome of its calls."""

    finish: FinishReason
    calls: tuple[CallRecord, ...] = ()
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        return {
            "finish": self.finish.value,
            "calls": [call.to_json() for call in self.calls],
            "generate_seconds": self.generate_seconds,
            "tool_seconds": self.tool_seconds,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the object that `to_json` returns."""
        calls = tuple(map(CallRecord.from_json, value["calls"]))
        return cls(FinishReason(value["finish"]), calls, value["generate_seconds"], value["tool_seconds"])


MAX_REWARD = 1e30
"""Larger rewards overflow in statistics and in float32, which advantages have."""


class ScoreComponent(NamedTuple):
    """One of several rewards, whose weighted sum is the score."""

    weight: float
    value: float


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of a chain."""

    total: float
    per_turn: tuple[float, ...] | None = None
    """One number per turn if the reward returned them; None if only the total is known."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    components: Mapping[str, ScoreComponent] = field(default_factory=dict)
    """The rewards by name, where the agent has several; without those that abstained."""

    def __post_init__(self) -> None:
        # Not `abs(value) > MAX_REWARD`: that is false for NaN.
        if not all(abs(value) <= MAX_REWARD for value in (self.total, *(self.per_turn or ()))):
            raise RecordError(
                f"a score must be finite, and at most {MAX_REWARD:g}, not {self.total} of {self.per_turn}"
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        per_turn = None if self.per_turn is None else list(self.per_turn)
        metrics = require_json(self.metrics, "metrics of the reward")
        score = {"total": self.total, "per_turn": per_turn, "metrics": metrics}
        components = {name: component._asdict() for name, component in self.components.items()}
        return {**score, "components": components} if components else score

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the object that `to_json` returns."""
        per_turn = value["per_turn"]
        components = {name: ScoreComponent(**component) for name, component in value.get("components", {}).items()}
        return cls(value["total"], None if per_turn is None else tuple(per_turn), value["metrics"], components)


@dataclass(frozen=True, slots=True, repr=False)
class Trajectory:
    """The record of one finished chain."""

    task: Task
    segments: tuple[Segment, ...]
    turns: tuple[TurnRecord, ...]
    stop: StopReason
    prediction: str
    """The final answer: the model's last reply, or the observation of the tool that ended the chain."""
    group: int = 0
    """Index of the task in the run; the chains of one task form a group."""
    chain: int = 0
    """Index of the chain in its group."""
    score: Score | None = None
    """None if there is no reward, or scoring failed."""
    treatment: TrainingTreatment = TrainingTreatment.TRAIN
    failures: tuple[Failure, ...] = ()
    seconds: float = 0.0
    attempts: int = 1
    branch_of: int | None = None
    """Index in the group of the chain that it was forked from; None: it began with the task."""
    branch_turn: int = 0
    """Turns that it shares with that chain."""

    def __repr__(self) -> str:
        reward = "" if self.score is None else f", reward {self.score.total:g}"
        turns = f"{len(self.turns)} turn{'' if len(self.turns) == 1 else 's'}"
        return f"<Trajectory {self.id}: {self.stop.value} after {turns}{reward}>"

    @property
    def id(self) -> str:
        return chain_id(self.group, self.chain)

    @property
    def reward(self) -> float | None:
        return None if self.score is None else self.score.total

    @property
    def unscored_reason(self) -> str:
        """Why the chain has no score; empty if it has one."""
        if self.score is not None:
            return ""
        # A tool that fails does not keep a chain from being scored, and failures of earlier attempts were retried.
        messages = [
            failure.message
            for failure in self.failures
            if failure.kind is not FailureKind.TOOL and failure.attempt == self.attempts - 1
        ]
        return messages[-1] if messages else "the agent has no reward="

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as the model last saw it."""
        return self.segments[-1].messages if self.segments else self.task.messages

    @property
    def calls(self) -> Iterator[CallRecord]:
        return (call for turn in self.turns for call in turn.calls)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled for this chain; those before its fork were sampled for the chain it was forked from."""
        if self.branch_of is None:
            return sum(segment.num_sampled_tokens for segment in self.segments)
        spans = (span for segment in self.segments for span in segment.spans if span.turn >= self.branch_turn)
        return sum(len(span) for span in spans if span.author.carries_loss)

    @property
    def untrainable(self) -> str | None:
        """Why training must reject this chain; None if it can be trained."""
        if any(segment.images and segment.image_token_id is None for segment in self.segments):
            return (
                f"chain {self.id} has images whose tokens are unknown, since a server rendered its prompts; "
                "sample vision models with a backend that takes token ids"
            )
        if all(segment.exact for segment in self.segments):
            return None
        return (
            f"chain {self.id} was sampled through a server that returned no token ids or log-probabilities; "
            "use one that returns them (vLLM does), or a backend that takes token ids"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back to an equal trajectory."""
        columns = require_json(self.task.columns, f"column of task {self.task.id!r}")
        messages = [message_to_json(m) for m in self.task.messages]
        return {
            "task": {"messages": messages, "columns": columns, "id": self.task.id},
            "segments": [segment.to_json() for segment in self.segments],
            "turns": [turn.to_json() for turn in self.turns],
            "stop": self.stop.value,
            "prediction": self.prediction,
            "group": self.group,
            "chain": self.chain,
            "score": None if self.score is None else self.score.to_json(),
            "treatment": self.treatment.value,
            "failures": [failure.to_json() for failure in self.failures],
            "seconds": self.seconds,
            "attempts": self.attempts,
            **({} if self.branch_of is None else {"branch_of": self.branch_of, "branch_turn": self.branch_turn}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the object that `to_json` returns."""
        task = value["task"]
        return cls(
            task=Task(tuple(map(message_from_json, task["messages"])), task["columns"], task["id"]),
            segments=tuple(map(Segment.from_json, value["segments"])),
            turns=tuple(map(TurnRecord.from_json, value["turns"])),
            stop=StopReason(value["stop"]),
            prediction=value["prediction"],
            group=value["group"],
            chain=value["chain"],
            score=None if value["score"] is None else Score.from_json(value["score"]),
            treatment=TrainingTreatment(value["treatment"]),
            failures=tuple(map(Failure.from_json, value["failures"])),
            seconds=value["seconds"],
            attempts=value["attempts"],
            branch_of=value.get("branch_of"),
            branch_turn=value.get("branch_turn", 0),
        )

    def parts(
        self, decode: Callable[[Sequence[int]], str] | None = None
    ) -> Iterator[tuple[Author | None, str, str, tuple[Image, ...]]]:
        """Author, style, text and images of each part of a rendered chain: decoded tokens with `decode`, else messages.

        The author is None for headings and the closing line, which are not part of the chain.
        """
        for number, segment in enumerate(self.segments):
            if len(self.segments) > 1:
                yield None, "dim", f"── segment {number} ──\n", ()
            for span in segment.spans:
                if decode is not None and len(span):
                    text = decode(span.ids.tolist())
                else:
                    text = "".join(map(_render_message, span.messages))
                images = tuple(image for message in span.messages for image in message.images)
                yield span.author, AUTHOR_COLORS[span.author], text, images
            yield None, "", "\n", ()
        yield None, "dim", f"── {self.stop.value}", ()
        if self.score is not None:
            yield None, "bold", f", reward {self.score.total:g}", ()

    def render(self, decode: Callable[[Sequence[int]], str] | None = None) -> Text:
        """Text colored by author: decoded tokens with `decode`, else the messages."""
        from rich.text import Text

        return Text.assemble(*((text, style) for _, style, text, _ in self.parts(decode)))

    def __rich__(self) -> Text:
        return self.render()


def chain_id(group: int, chain: int) -> str:
    """The name of a chain in a run: `GROUP/CHAIN`."""
    return f"{group}/{chain}"


def _render_message(message: Message) -> str:
    lines = [message.thinking, message.text, *("(image)" for _ in message.images)]
    for call in message.tool_calls:
        problem = f" ({call.problem})" if call.problem else ""
        lines.append(f"→ {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=str)}){problem}")
    return f"{message.role}: " + "\n".join(line for line in lines if line) + "\n"
