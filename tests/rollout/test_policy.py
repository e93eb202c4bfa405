"""What is declared before a chain runs."""

from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.outcome import FailureKind, StopReason, Treatment
from agentfly.rollout.policy import FailurePolicy, Limits, Reaction, Then


def test_a_reaction_is_read_from_words_fields_and_itself() -> None:
    assert Reaction.of("end") == Reaction(Then.END)
    assert Reaction.of("continue") == Reaction()
    assert Reaction.of({"nudge": "x", "limit": 2}) == Reaction(Then.CONTINUE, "x", 2)
    assert Reaction.of(Reaction(limit=None)) == Reaction(limit=None)
    assert Reaction("end").then is Then.END  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["stop", {"thn": "end"}, {"limit": 0}, {"then": "end", "nudge": "x"}, 3])
def test_what_is_no_reaction_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError):
        Reaction.of(given)


def test_every_failure_has_a_treatment_and_an_end_without_failure_trains() -> None:
    policy = FailurePolicy.of({"timeout": "zero", "retries": 3})
    assert policy.treatment(None) is Treatment.TRAIN
    assert policy.treatment(FailureKind.TIMEOUT) is Treatment.ZERO
    assert all(isinstance(policy.treatment(kind), Treatment) for kind in FailureKind)
    assert all(isinstance(policy.treatment(stop.failure), Treatment) for stop in StopReason)
    assert FailurePolicy.of(None) == FailurePolicy()
    assert FailurePolicy.of(policy) is policy


def test_only_what_was_not_the_models_or_the_users_doing_is_retried() -> None:
    retried = {kind for kind in FailureKind if FailurePolicy().retried(kind)}
    assert retried == {FailureKind.ENVIRONMENT, FailureKind.BACKEND}


@pytest.mark.parametrize(
    "given", [{"max_turns": 0}, {"max_turns": None}, {"chain_seconds": -1}, {"context_length": "8k"}]
)
def test_limits_are_numbers_above_zero(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        Limits(**given)
