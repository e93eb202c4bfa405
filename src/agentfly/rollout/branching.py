"""Tree sampling: where chains branch, and what a branch continues from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from agentfly.environment import Environment
from agentfly.errors import ConfigError
from agentfly.rollout.limits import StopPolicy
from agentfly.rollout.transcript import Transcript
from agentfly.trajectory import Failure, TurnRecord
from agentfly.types import Message
from agentfly.validation import PositiveInt, validate_fields


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
