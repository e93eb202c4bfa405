"""What is declared before a chain runs: reactions to the model's slips, limits, and what to make of failures."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from agentfly.errors import ConfigError
from agentfly.outcome import FailureKind, Treatment
from agentfly.types import MAX_CALLS


class Then(enum.Enum):
    """How a chain proceeds."""

    END = "end"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Reaction:
    """What happens after a turn of some kind."""

    then: Then = Then.CONTINUE
    nudge: str | None = None
    """A user message to go on with; None adds nothing."""
    limit: int | None = 3
    """How many such turns are borne, without a good one between them, before the chain ends; None: no limit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", Then(self.then))
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"a reaction's limit must be at least 1, not {self.limit}; None means no limit")
        if self.then is Then.END and self.nudge is not None:
            raise ConfigError("a reaction that ends the chain has no use for a nudge; write then='continue'")

    @classmethod
    def of(cls, value: Reaction | str | Mapping[str, Any]) -> Reaction:
        """Read `"end"`, `"continue"`, or a Reaction or its fields."""
        if isinstance(value, Reaction):
            return value
        try:
            return cls(value) if isinstance(value, str) else cls(**value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{value!r} is no reaction; write 'end', 'continue', or Reaction(then, nudge=…, limit=…) ({error})"
            ) from error


@dataclass(frozen=True, slots=True)
class Control:
    """Reactions to a reply that does not move the chain on."""

    on_no_call: Reaction
    """A reply without a call. Ending here makes the reply the final answer."""
    on_invalid_call: Reaction
    """A call that cannot be run: unreadable, unknown tool, arguments that do not fit."""
    on_tool_error: Reaction
    """A tool whose own code failed or ran out of time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a chain may go. None means no limit."""

    max_turns: int = 10
    """Replies of the model, summaries included."""
    max_chain_tokens: int | None = None
    """Sampled tokens of the whole chain."""
    context_length: int | None = None
    """Tokens of prompt and reply together; the backend's own limit holds besides."""
    chain_seconds: float | None = None
    max_calls_per_turn: int = 64
    """Tool calls of one reply that are run, up to MAX_CALLS. The first call above it is answered with this limit and
    counts as invalid; it and the calls after it are not run."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_chain_tokens", "context_length", "chain_seconds", "max_calls_per_turn"):
            value = getattr(self, name)
            if value is None and name not in ("max_turns", "max_calls_per_turn"):
                continue
            kinds = (int, float) if name == "chain_seconds" else (int,)
            if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
                what = "a number" if name == "chain_seconds" else "a whole number"
                raise ConfigError(f"{name} must be {what} above 0, not {value!r}")
        if self.max_calls_per_turn > MAX_CALLS:
            raise ConfigError(f"max_calls_per_turn must be at most {MAX_CALLS}, not {self.max_calls_per_turn}")


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What becomes of a chain that failed."""

    retries: int = 1
    """How often a chain is run anew, with fresh environments, after an environment or backend fault; and how often a
    reward that failed is asked again."""
    environment: Treatment = Treatment.MASK
    backend: Treatment = Treatment.MASK
    agent: Treatment = Treatment.MASK
    reward: Treatment = Treatment.MASK
    tool: Treatment = Treatment.MASK
    timeout: Treatment = Treatment.MASK
    cancelled: Treatment = Treatment.MASK
    truncation: Treatment = Treatment.TRAIN
    parse: Treatment = Treatment.TRAIN

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ConfigError(f"retries must be 0 or more, not {self.retries}")

    @classmethod
    def of(cls, value: FailurePolicy | Mapping[str, Any] | None) -> FailurePolicy:
        """Read a policy, or its fields with treatments by name; None is the default."""
        if value is None or isinstance(value, FailurePolicy):
            return value or cls()
        try:
            given: dict[str, Any] = {name: v if name == "retries" else Treatment(v) for name, v in value.items()}
            return cls(**given)
        except (AttributeError, TypeError, ValueError) as error:
            known, treatments = ", ".join(f.name for f in fields(cls)), ", ".join(t.value for t in Treatment)
            raise ConfigError(
                f"{value!r} is no failure policy; it maps {known} to {treatments} (retries to a number)"
            ) from error

    def treatment(self, kind: FailureKind | None) -> Treatment:
        """What training makes of a chain that ended in such a failure; None: in none."""
        treatment: Treatment = Treatment.TRAIN if kind is None else getattr(self, kind.value)
        return treatment

    def retried(self, kind: FailureKind) -> bool:
        """Whether running the chain anew could help: the fault was neither the model's nor in the user's code."""
        return kind in (FailureKind.ENVIRONMENT, FailureKind.BACKEND)
