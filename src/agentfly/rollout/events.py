"""What happens in a rollout, as it happens.

For every chain: ChainStarted, then for each turn Tokens (as they come; without ids from a server that gives none),
Replied, Called for each call that is run and Observed for every call, then Rewarded if there is a reward, then
ChainEnded. A chain that is run anew says Retried and starts over. A run that is cancelled says nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentfly.outcome import Failure, Score
from agentfly.tooling import ToolResult
from agentfly.trajectory import Trajectory, chain_id
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
class Tokens(Event):
    """The model sampled some tokens."""

    turn: int
    ids: tuple[int, ...]
    text: str
    """All of the turn's text so far, so that a glyph split over tokens is never shown broken."""


@dataclass(frozen=True, slots=True)
class Replied(Event):
    """The model finished a turn."""

    turn: int
    message: Message


@dataclass(frozen=True, slots=True)
class Called(Event):
    """A tool is being called."""

    turn: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class Observed(Event):
    """A call came to something."""

    turn: int
    call: ToolCall
    result: ToolResult


@dataclass(frozen=True, slots=True)
class Retried(Event):
    """A chain failed and is run anew."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Rewarded(Event):
    """A chain was scored."""

    score: Score


@dataclass(frozen=True, slots=True)
class ChainEnded(Event):
    """A chain ended; this is its record."""

    trajectory: Trajectory


Observer = Callable[[Event], None]
"""Called with every event, in order for each chain. One that raises fails the run."""
