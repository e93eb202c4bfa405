"""Folding rules: how the history of a chain is shortened. Each rewrite seals a segment and begins the next; both train.

A rule receives the initial messages of the chain and the later ones, and returns the conversation to continue with, or
None for no change. A rule that needs a summary asks for it with `summary_request`: the model's next turn is the
summary, and trains like any other turn.

Tree sampling (`Branching`): where chains branch, and what a branch continues from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

from pydantic import Field

from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.rollout.limits import StopPolicy
from agentfly.rollout.transcript import Transcript
from agentfly.trajectory import Failure, TurnRecord
from agentfly.types import Content, Image, Message
from agentfly.validation import NonNegativeInt, PositiveInt, validate_fields


class Folding(Protocol):
    """A rule that shortens the history."""

    def summary_request(self, later: Sequence[Message], tokens: int) -> str | None:
        """A request for a summary if one is due, else None. `tokens`: length of the prompt so far."""

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The history to continue with, or None for no change. It begins with as many messages as `initial` has.

        initial: the messages the chain started with. later: the messages after them, as the last fold left them.
        summary: the reply to `summary_request`; None if no summary was requested.
        """


class _NoSummary:
    """Base of rules that need no summary."""

    __slots__ = ()

    def summary_request(self, later: Sequence[Message], tokens: int) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class KeepObservations(_NoSummary):
    """Replaces all but the last observations with a placeholder."""

    last: NonNegativeInt = 3
    placeholder: str = "(left out)"

    def __post_init__(self) -> None:
        validate_fields(self, "KeepObservations: ")

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """Without tool messages, as with agents that receive observations in user messages, user messages count."""
        role = "tool" if any(m.role == "tool" for m in later) else "user"
        answers = [i for i, m in enumerate(later) if m.role == role]
        old = {i for i in answers[: max(len(answers) - self.last, 0)] if later[i].content != self.placeholder}
        if not old:
            return None
        return [*initial, *(replace(m, content=self.placeholder) if i in old else m for i, m in enumerate(later))]


@dataclass(frozen=True, slots=True)
class KeepImages(_NoSummary):
    """Replaces all but the last images with a placeholder, also in the initial messages."""

    last: NonNegativeInt = 1
    placeholder: str = "(earlier image left out)"

    def __post_init__(self) -> None:
        validate_fields(self, "KeepImages: ")

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The history with the placeholder for all but the last images, or None if there are few enough."""
        messages = [*initial, *later]
        excess = sum(len(m.images) for m in messages) - self.last
        if excess <= 0:
            return None
        out = []
        for message in messages:
            if not isinstance(message.content, str) and excess > 0:
                parts: list[str | Image] = []
                for part in message.content:
                    if isinstance(part, Image) and excess > 0:
                        part, excess = self.placeholder, excess - 1
                    parts.append(part)
                message = replace(message, content=tuple(parts))
            out.append(message)
        return out


@dataclass(frozen=True, slots=True)
class Summarize:
    """Asks the model for a summary; the initial messages and the summary replace the history."""

    over_tokens: int
    """Prompt length in tokens above which a summary is requested."""
    request: str = "Sum up what you have done and found, and what is left to do. You will go on from this summary."
    heading: str = "Summary of what happened so far:"

    def summary_request(self, later: Sequence[Message], tokens: int) -> str | None:
        """The request once the prompt is longer than `over_tokens`."""
        if tokens == 0:
            raise ConfigError("Summarize depends on the prompt length, but this server returns no token ids to count")
        return self.request if tokens > self.over_tokens else None

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The initial messages with the summary appended, or None without a summary."""
        return None if summary is None else append_user_text(initial, [f"{self.heading}\n{summary}"])


@dataclass(frozen=True, slots=True)
class StepHistory(_NoSummary):
    """Every step is its own segment: the initial messages and the last few turns with their observations."""

    history: NonNegativeInt = 2
    """Number of earlier turns in the prompt. With 0, the last observation is appended to the question."""

    def __post_init__(self) -> None:
        validate_fields(self, "StepHistory: ")

    def fold(self, initial: Sequence[Message], later: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The initial messages and the last turns, or None before the first turn."""
        turns = [i for i, m in enumerate(later) if m.role == "assistant"]
        if not turns:
            return None
        if self.history == 0:
            return append_user_text(initial, [m.content for m in later[turns[-1] + 1 :]])
        return [*initial, *later[turns[max(len(turns) - self.history, 0)] :]]


def append_user_text(messages: Sequence[Message], contents: Sequence[Content]) -> list[Message]:
    """Append to the user message at the end: many chat templates reject two user messages in a row."""
    if not contents:
        return list(messages)
    if not messages or messages[-1].role != "user":
        return [*messages, Message("user", join_content(contents))]
    *before, last = messages
    return [*before, replace(last, content=join_content([last.content, *contents]))]


def join_content(contents: Sequence[Content]) -> Content:
    """Join contents with blank lines between them."""
    parts: list[str | Image] = []
    for content in contents:
        if parts:
            parts.append("\n\n")
        parts.extend([content] if isinstance(content, str) else content)
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


@dataclass(frozen=True, slots=True)
class Branching:
    """Tree sampling: a chain that goes on after `turn` turns is continued `branches` times from there."""

    turn: PositiveInt
    """Turns before the branching point, which the branches share."""
    branches: Annotated[int, Field(strict=True, ge=2)]
    """Continuations from there, that of the chain itself included."""

    def __post_init__(self) -> None:
        validate_fields(self, "branching: ")

    @classmethod
    def of(cls, value: Branching | Mapping[str, Any] | None, max_turns: int) -> Branching | None:
        """Convert a mapping of both fields; None stays None. Raises ConfigError if no chain can reach the turn."""
        if isinstance(value, Mapping) and set(value) != {"turn", "branches"}:
            raise ConfigError(f"branching={dict(value)!r}: it has turn and branches, such as turn=1, branches=4")
        if value is not None and not isinstance(value, Branching | Mapping):
            raise ConfigError(f"branching must be a Branching or a mapping of its fields, not {value!r:.80}")
        branching = cls(**value) if isinstance(value, Mapping) else value
        if branching is not None and branching.turn >= max_turns:
            raise ConfigError(
                f"branching after {branching.turn} turns would have no effect: chains have at most {max_turns}"
            )
        return branching


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A chain between two turns, from which other chains continue: the tokens so far and the environments' states."""

    transcript: Transcript
    turns: tuple[TurnRecord, ...]
    failures: tuple[Failure, ...]
    stop_policy: StopPolicy
    initial: Sequence[Message]
    prediction: str
    summarizing: bool
    num_calls: int
    num_sampled: int
    environments: Mapping[type[Environment], Any]
