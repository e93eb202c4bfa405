"""Rules by which a chain's history is shortened. Each rewrite seals a segment and begins the next; both are trained.

A rule sees what the chain opened with and what was said since, and returns the conversation to go on with, or None to
leave it as it is. A rule that wants words from the model first says so through `asks`: the model's next turn is the
summary, and is trained like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentfly.errors import ConfigError
from agentfly.types import Content, Image, Message


class Folding(Protocol):
    """How a history is shortened."""

    def asks(self, since: Sequence[Message], tokens: int) -> str | None:
        """A request for a summary, when one is due; None when not. `tokens` is the length of the prompt so far."""

    def fold(self, opening: Sequence[Message], since: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The history to go on with, or None for no change. It begins with as many messages as the opening has.

        `opening` is always what the chain began with; `since` what was said after it, as the last fold left it;
        `summary` the reply to `asks`, or None when none was asked for.
        """


@dataclass(frozen=True, slots=True)
class KeepObservations:
    """Old tool answers are left out; the last ones stay."""

    last: int = 3
    placeholder: str = "(left out)"

    def __post_init__(self) -> None:
        _refuse_negative("KeepObservations", "last", self.last)

    def asks(self, since: Sequence[Message], tokens: int) -> str | None:
        return None

    def fold(self, opening: Sequence[Message], since: Sequence[Message], summary: str | None) -> list[Message] | None:
        """Where no message is a tool's, as with agents that are answered in the user's turn, those turns count."""
        role = "tool" if any(m.role == "tool" for m in since) else "user"
        answers = [i for i, m in enumerate(since) if m.role == role]
        old = {i for i in answers[: max(len(answers) - self.last, 0)] if since[i].content != self.placeholder}
        if not old:
            return None
        return [*opening, *(replace(m, content=self.placeholder) if i in old else m for i, m in enumerate(since))]


@dataclass(frozen=True, slots=True)
class KeepImages:
    """Old pictures are left out, those of the opening too; the last ones stay."""

    last: int = 1
    placeholder: str = "(earlier picture left out)"

    def __post_init__(self) -> None:
        _refuse_negative("KeepImages", "last", self.last)

    def asks(self, since: Sequence[Message], tokens: int) -> str | None:
        return None

    def fold(self, opening: Sequence[Message], since: Sequence[Message], summary: str | None) -> list[Message] | None:
        messages = [*opening, *since]
        spare = sum(len(m.images) for m in messages) - self.last
        if spare <= 0:
            return None
        out = []
        for message in messages:
            if not isinstance(message.content, str) and spare > 0:
                parts: list[str | Image] = []
                for part in message.content:
                    if isinstance(part, Image) and spare > 0:
                        part, spare = self.placeholder, spare - 1
                    parts.append(part)
                message = replace(message, content=tuple(parts))
            out.append(message)
        return out


@dataclass(frozen=True, slots=True)
class Summarise:
    """The model sums up what happened so far; the question and the summary are all that stays."""

    over_tokens: int
    """The length of the prompt from which a summary is asked for."""
    request: str = "Sum up what you have done and found, and what is left to do. You will go on from this summary."
    heading: str = "Summary of what happened so far:"

    def asks(self, since: Sequence[Message], tokens: int) -> str | None:
        if tokens == 0:
            raise ConfigError("Summarise goes by the prompt's length, and this server returns no token ids to count")
        return self.request if tokens > self.over_tokens else None

    def fold(self, opening: Sequence[Message], since: Sequence[Message], summary: str | None) -> list[Message] | None:
        return None if summary is None else told_also(opening, [f"{self.heading}\n{summary}"])


@dataclass(frozen=True, slots=True)
class Steps:
    """Every step is a segment of its own: the opening, and the last few turns with what they led to."""

    history: int = 2
    """How many earlier turns the model still sees. With 0, the world's last answer stands beside the question."""

    def __post_init__(self) -> None:
        _refuse_negative("Steps", "history", self.history)

    def asks(self, since: Sequence[Message], tokens: int) -> str | None:
        return None

    def fold(self, opening: Sequence[Message], since: Sequence[Message], summary: str | None) -> list[Message] | None:
        turns = [i for i, m in enumerate(since) if m.role == "assistant"]
        if not turns:
            return None
        if self.history == 0:
            return told_also(opening, [m.content for m in since[turns[-1] + 1 :]])
        return [*opening, *since[turns[max(len(turns) - self.history, 0)] :]]


def told_also(messages: Sequence[Message], contents: Sequence[Content]) -> list[Message]:
    """The messages, with more said in the user's turn at their end: many templates refuse two of those in a row."""
    if not contents:
        return list(messages)
    if not messages or messages[-1].role != "user":
        return [*messages, Message("user", joined(contents))]
    *before, last = messages
    return [*before, replace(last, content=joined([last.content, *contents]))]


def joined(contents: Sequence[Content]) -> Content:
    """Several contents as one, a blank line between them."""
    parts: list[str | Image] = []
    for content in contents:
        if parts:
            parts.append("\n\n")
        parts.extend([content] if isinstance(content, str) else content)
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def _refuse_negative(rule: str, name: str, value: int) -> None:
    if value < 0:
        raise ConfigError(f"{rule}: {name} must be 0 or more, not {value}")
