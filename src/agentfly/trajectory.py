"""The record of one finished chain.

Trajectory            frozen, born complete
 └─ Segment           append-only; at every turn exactly what the model was shown
     └─ Span          tokens of one author
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from agentfly import recording
from agentfly.outcome import CallRecord, Failure, Score, StopReason, Treatment, Turn
from agentfly.segment import Author, Segment
from agentfly.types import Message, Task

if TYPE_CHECKING:
    from rich.text import Text


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
        return sum(segment.sampled for segment in self.segments)

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
