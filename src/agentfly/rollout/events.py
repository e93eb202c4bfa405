"""Events of a rollout, in the order in which they are emitted.

Per chain: ChainStarted; per turn TokensSampled (as tokens arrive; without ids from a server that returns none),
ReplyReceived, ToolCalled for each executed call and ToolReturned for every call; ChainScored if there is a reward;
ChainEnded. A retried chain emits ChainRetried and starts over. A cancelled run emits nothing further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentfly.tooling import ToolResult
from agentfly.trajectory import Failure, Score, Trajectory, chain_id
from agentfly.types import Message, Task, ToolCall


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in one chain."""

    group: int
    chain: int

    @property
    def chain_id(self) -> str:
        return chain_id(self.group, self.chain)


@dataclass(frozen=True, slots=True)
class ChainStarted(Event):
    """A chain began."""

    task: Task


@dataclass(frozen=True, slots=True)
class TokensSampled(Event):
    """The model sampled tokens."""

    turn: int
    ids: tuple[int, ...]
    text: str
    """All of the turn's text so far, so that a glyph split over tokens is never shown broken."""


@dataclass(frozen=True, slots=True)
class ReplyReceived(Event):
    """The model finished a turn."""

    turn: int
    message: Message


@dataclass(frozen=True, slots=True)
class ToolCalled(Event):
    """A tool is being called."""

    turn: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolReturned(Event):
    """A call has a result."""

    turn: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class ChainRetried(Event):
    """A chain failed and is run again."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class ChainScored(Event):
    """A chain was scored."""

    score: Score


@dataclass(frozen=True, slots=True)
class ChainEnded(Event):
    """A chain ended; this is its record."""

    trajectory: Trajectory


Observer = Callable[[Event], None]
"""Called with every event, in order for each chain. One that raises fails the run."""
