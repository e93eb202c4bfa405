"""Rules by which a chain's history is shortened. Each rewrite seals a segment and begins the next; both are trained.

A rule sees the conversation and returns the conversation to go on with, or None to leave it as it is. A rule that wants
words from the model first says so through `asks`: the model's next turn is the summary, and is trained like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentfly.types import Message


class Folding(Protocol):
    """How a history is shortened."""

    def asks(self, messages: Sequence[Message], tokens: int) -> str | None:
        """A request for a summary, when one is due; None when not. `tokens` is the length of the prompt now."""

    def fold(self, messages: Sequence[Message], summary: str | None) -> list[Message] | None:
        """The history to go on with, or None for no change. `summary` is the reply to `asks`."""


def split_opening(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The messages before the model's first turn, and the rest."""
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))
    return list(messages[:first]), list(messages[first:])


@dataclass(frozen=True, slots=True)
class KeepObservations:
    """Old tool answers are left out; the last ones stay."""

    last: int = 3
    placeholder: str = "(left out)"

    def asks(self, messages: Sequence[Message], tokens: int) -> str | None:
        return None

    def fold(self, messages: Sequence[Message], summary: str | None) -> list[Message] | None:
        answers = [i for i, m in enumerate(messages) if m.role == "tool"]
        old = {i for i in answers[: max(len(answers) - self.last, 0)] if messages[i].content != self.placeholder}
        if not old:
            return None
        return [replace(m, content=self.placeholder) if i in old else m for i, m in enumerate(messages)]


@dataclass(frozen=True, slots=True)
class KeepImages:
    """Old pictures are left out; the last ones stay."""

    last: int = 1
    placeholder: str = "(earlier picture left out)"

    def asks(self, messages: Sequence[Message], tokens: int) -> str | None:
        return None

    def fold(self, messages: Sequence[Message], summary: str | None) -> list[Message] | None:
        spare = sum(len(m.images) for m in messages) - self.last
        if spare <= 0:
            return None
        out = []
        for message in messages:
            if not isinstance(message.content, str) and spare > 0:
                parts = []
                for part in message.content:
                    if not isinstance(part, str) and spare > 0:
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
    request: str = "Sum up what you have done and found so far, and what is left to do. You will go on from this summary."
    heading: str = "Summary of what happened so far:"

    def asks(self, messages: Sequence[Message], tokens: int) -> str | None:
        return self.request if tokens > self.over_tokens else None

    def fold(self, messages: Sequence[Message], summary: str | None) -> list[Message] | None:
        if summary is None:
            return None
        opening, _ = split_opening(messages)
        last = opening[-1]
        text = last.text.partition(f"\n\n{self.heading}\n")[0]
        content = f"{text}\n\n{self.heading}\n{summary}"
        return [*opening[:-1], replace(last, content=(*last.images, content) if last.images else content)]


@dataclass(frozen=True, slots=True)
class Steps:
    """Every step is a segment of its own: the opening, and the last few turns with what they led to."""

    history: int = 2
    """How many earlier turns the model still sees."""

    def asks(self, messages: Sequence[Message], tokens: int) -> str | None:
        return None

    def fold(self, messages: Sequence[Message], summary: str | None) -> list[Message] | None:
        opening, rest = split_opening(messages)
        turns = [i for i, m in enumerate(rest) if m.role == "assistant"]
        if not turns:
            return None
        kept = rest[turns[-self.history] :] if 0 < self.history <= len(turns) else rest if self.history else []
        if not self.history:  # the world's last answer is all the model sees of what happened
            kept = [Message("user", m.content) for m in rest[turns[-1] + 1 :]]
        return [*opening, *kept]
