"""How a chain and its calls ended: why it stopped, what broke, what it earned, and what training makes of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentfly.errors import RecordError
from agentfly.types import Finish


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
    retries: int = 0
    """Failed attempts before this one."""


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

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.total, *(self.per_turn or ())))):
            raise RecordError(f"a score must be finite, not {self.total} of {self.per_turn}")
