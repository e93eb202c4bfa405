"""Limits, recovery rules and failure policy of a chain, and the decision whether a turn ends it."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import Field

from agentfly.errors import ConfigError
from agentfly.tooling import ToolResult
from agentfly.trajectory import CallStatus, FailureKind, StopReason, TrainingTreatment
from agentfly.types import MAX_CALLS, Reply, Sampling
from agentfly.validation import NonNegativeInt, record, validate


class NextStep(enum.Enum):
    """How a chain proceeds."""

    END = "end"
    CONTINUE = "continue"


@record(prefix="a recovery rule's ")
class RecoveryRule:
    """What happens after a turn without progress."""

    then: NextStep = NextStep.CONTINUE
    """Whether the chain continues or ends."""
    nudge: str | None = None
    """A user message to continue with; None adds no message."""
    limit: int | None = Field(default=3, ge=1)
    """Consecutive turns of this kind that are allowed; one more ends the chain. None: no limit."""

    def __post_init__(self) -> None:
        if self.then is NextStep.END and self.nudge is not None:
            raise ConfigError("a recovery rule that ends the chain cannot have a nudge; write then='continue'")

    @classmethod
    def of(cls, value: RecoveryRule | str | Mapping[str, Any]) -> RecoveryRule:
        """Convert `"end"`, `"continue"`, a rule, or a mapping with the fields of a rule."""
        if isinstance(value, RecoveryRule):
            return value
        try:
            return cls(value) if isinstance(value, str) else cls(**value)  # type: ignore[arg-type]
        except (ConfigError, TypeError) as error:
            raise ConfigError(
                f"{value!r} is not a recovery rule; write 'end', 'continue', or "
                f"RecoveryRule(then, nudge=…, limit=…) ({error})"
            ) from error


@dataclass(frozen=True, slots=True)
class LoopControl:
    """The recovery rules of an agent."""

    on_no_call: RecoveryRule
    """A reply without a call. Ending here makes the reply the final answer."""
    on_invalid_call: RecoveryRule
    """A call that cannot be run: unreadable, unknown tool, invalid arguments."""
    on_tool_error: RecoveryRule
    """A tool whose own code raised or timed out."""
    on_repeated_call: RecoveryRule | None = None
    """Calls that all got the same observation before. None: they are like other calls."""


StopDecision = tuple[StopReason | None, Sequence[str]]
"""Why the chain ends after this turn (None: it continues), and user messages to continue with."""


class StopPolicy:
    """Decides after each turn of one chain whether the chain ends."""

    __slots__ = ("_control", "_failed_turns")

    def __init__(self, control: LoopControl) -> None:
        self._control = control
        self._failed_turns: dict[StopReason, int] = {}
        """Turns without progress since the last one with progress, by the stop reason they lead to."""

    def decide(self, reply: Reply, results: Sequence[ToolResult], cut: StopReason | None) -> StopDecision:
        """`cut`: the limit that truncated the turn; None if the model ended the turn itself."""
        statuses = []
        for result in results:
            if result.ends_chain:
                return StopReason.TOOL_TIMEOUT if result.status is CallStatus.TIMEOUT else StopReason.TOOL_END, ()
            statuses.append(result.status)
        # A truncated reply goes on if one of its calls ran: the calls were complete, and only text after them is
        # missing.
        if cut is not None and CallStatus.OK not in statuses:
            return cut, ()
        if reply.answer is not None:
            return StopReason.ANSWER, ()
        if CallStatus.ERROR in statuses:
            return self._count_failure(self._control.on_tool_error, StopReason.TOOL_FAULT)
        if CallStatus.TIMEOUT in statuses:
            return self._count_failure(self._control.on_tool_error, StopReason.TOOL_TIMEOUT)
        if results and not reply.problems and all(status in _SUCCESSFUL for status in statuses):
            if self._control.on_repeated_call is not None and all(result.repeated for result in results):
                return self._count_failure(self._control.on_repeated_call, StopReason.REPEATED_CALL)
            # Limits count turns in a row: a model that makes one mistake in ten turns must not run out of them.
            if self._failed_turns:
                self._failed_turns.clear()
            return None, ()
        if results:
            return self._count_failure(self._control.on_invalid_call, StopReason.INVALID_CALL)
        if reply.problems:
            stop, nudge = self._count_failure(self._control.on_invalid_call, StopReason.INVALID_CALL)
            return stop, (f"Error: your reply could not be read: {'; '.join(reply.problems)}.", *nudge)
        ends = self._control.on_no_call.then is NextStep.END
        return self._count_failure(self._control.on_no_call, StopReason.ANSWER if ends else StopReason.NO_CALL)

    def __copy__(self) -> StopPolicy:
        other = StopPolicy(self._control)
        other._failed_turns = dict(self._failed_turns)
        return other

    def _count_failure(self, rule: RecoveryRule, stop: StopReason) -> StopDecision:
        count = self._failed_turns[stop] = self._failed_turns.get(stop, 0) + 1
        if rule.then is NextStep.END or (rule.limit is not None and count > rule.limit):
            return stop, ()
        return None, () if rule.nudge is None else (rule.nudge,)


_SUCCESSFUL = (CallStatus.OK, CallStatus.SKIPPED)


@record()
class ChainLimits:
    """Limits of one chain. None means no limit."""

    max_turns: int = Field(default=10, strict=True, ge=1)
    """Replies of the model, including summaries."""
    max_chain_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens of the whole chain."""
    context_length: int | None = Field(default=None, ge=1)
    """Tokens of prompt and reply together; the backend's own limit applies as well."""
    chain_seconds: float | None = Field(default=None, gt=0)
    """Wall-clock seconds of the chain."""
    max_calls_per_turn: int = Field(default=64, strict=True, ge=1, le=MAX_CALLS)
    """Tool calls of one reply that are run, up to MAX_CALLS. The first call above the limit is answered with an error
    that states the limit and counts as invalid; it and all later calls are not run."""


def limit_sampling(
    sampling: Sampling,
    limits: ChainLimits,
    *,
    prompt: int,
    sampled: int,
    context_length: int | None,
    seed: int | None,
) -> tuple[Sampling | None, StopReason]:
    """Lower `max_tokens` of the next turn to what all limits leave, and name the limit that then cuts the turn.

    prompt: tokens of the prompt. sampled: tokens that the chain has sampled. context_length: the backend's limit.
    seed: the seed of the turn; None keeps that of the sampling. The sampling is None if nothing is left.
    """
    max_tokens = sampling.max_tokens
    truncation = StopReason.TRUNCATED
    for limit, used, reason in (
        (limits.context_length, prompt, StopReason.CONTEXT_LIMIT),
        (context_length, prompt, StopReason.CONTEXT_LIMIT),
        (limits.max_chain_tokens, sampled, StopReason.MAX_TOKENS),
    ):
        # Strictly less: of equal limits the first names the cause.
        if limit is not None and (max_tokens is None or limit - used < max_tokens):
            max_tokens, truncation = limit - used, reason
    if max_tokens is not None and max_tokens <= 0:
        return None, truncation
    seed = sampling.seed if seed is None else seed
    if (max_tokens, seed) != (sampling.max_tokens, sampling.seed):
        sampling = sampling.for_turn(max_tokens, seed)
    return sampling, truncation


def seed_for_turn(seed: int | None, group: int, chain: int, turn: int) -> int | None:
    """The seed of a turn, which depends on the run's seed and the place of the turn only; None if the run has none."""
    if seed is None:
        return None
    key = repr((seed, group, chain, turn))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """How training treats a failed chain, per kind of failure, and how often it is retried."""

    retries: int = 1
    """Further attempts with new environment instances after an environment or backend fault; also further calls of a
    reward that failed."""
    environment: TrainingTreatment = TrainingTreatment.MASK
    """An environment died, or did not start, reset or answer in time."""
    backend: TrainingTreatment = TrainingTreatment.MASK
    """The backend could not sample a turn."""
    agent: TrainingTreatment = TrainingTreatment.MASK
    """The agent's own code raised."""
    reward: TrainingTreatment = TrainingTreatment.MASK
    """The reward raised, took too long, or returned no number."""
    tool: TrainingTreatment = TrainingTreatment.MASK
    """A tool's own code raised, and `on_tool_error` ended the chain."""
    timeout: TrainingTreatment = TrainingTreatment.MASK
    """`chain_seconds` passed."""
    cancelled: TrainingTreatment = TrainingTreatment.MASK
    """The backend aborted a turn."""
    truncation: TrainingTreatment = TrainingTreatment.TRAIN
    """A limit of tokens or of the context cut the chain off."""
    parse: TrainingTreatment = TrainingTreatment.TRAIN
    """More calls in a row were invalid than `on_invalid_call` allows."""

    def __post_init__(self) -> None:
        validate("retries", self.retries, NonNegativeInt)

    @classmethod
    def of(cls, value: FailurePolicy | Mapping[str, Any] | None) -> FailurePolicy:
        """Convert a policy, or a mapping of its fields with treatments by name; None is the default policy."""
        if value is None or isinstance(value, FailurePolicy):
            return value or cls()
        try:
            settings: dict[str, Any] = {n: v if n == "retries" else TrainingTreatment(v) for n, v in value.items()}
            return cls(**settings)
        except (AttributeError, TypeError, ValueError) as error:
            names = ", ".join(field.name for field in fields(cls))
            treatments = ", ".join(treatment.value for treatment in TrainingTreatment)
            raise ConfigError(
                f"{value!r} is not a failure policy; it maps {names} to {treatments} (retries to a number)"
            ) from error

    def treatment(self, kind: FailureKind | None) -> TrainingTreatment:
        """How training treats a chain that ended in this kind of failure; None: without failure."""
        treatment: TrainingTreatment = TrainingTreatment.TRAIN if kind is None else getattr(self, kind.value)
        return treatment

    def should_retry(self, kind: FailureKind) -> bool:
        """Whether a new attempt could succeed: neither the model nor the user's code caused the failure."""
        return kind in (FailureKind.ENVIRONMENT, FailureKind.BACKEND)
