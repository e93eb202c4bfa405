"""Limits, recovery rules and failure policies."""

from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.rollout.limits import ChainLimits, FailurePolicy, NextStep, RecoveryRule
from agentfly.trajectory import FailureKind, StopReason, TrainingTreatment


def test_recovery_rule_from_text_mapping_and_rule() -> None:
    assert RecoveryRule.of("end") == RecoveryRule(NextStep.END)
    assert RecoveryRule.of("continue") == RecoveryRule()
    assert RecoveryRule.of({"nudge": "x", "limit": 2}) == RecoveryRule(NextStep.CONTINUE, "x", 2)
    assert RecoveryRule.of(RecoveryRule(limit=None)) == RecoveryRule(limit=None)
    assert RecoveryRule("end").then is NextStep.END  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["stop", {"thn": "end"}, {"limit": 0}, {"then": "end", "nudge": "x"}, 3])
def test_invalid_recovery_rule_is_rejected(rule: Any) -> None:
    with pytest.raises(ConfigError):
        RecoveryRule.of(rule)


def test_every_failure_has_a_treatment_and_an_end_without_failure_trains() -> None:
    policy = FailurePolicy.of({"timeout": "zero", "retries": 3})
    assert policy.treatment(None) is TrainingTreatment.TRAIN
    assert policy.treatment(FailureKind.TIMEOUT) is TrainingTreatment.ZERO
    assert all(isinstance(policy.treatment(kind), TrainingTreatment) for kind in FailureKind)
    assert all(isinstance(policy.treatment(stop.failure), TrainingTreatment) for stop in StopReason)
    assert FailurePolicy.of(None) == FailurePolicy()
    assert FailurePolicy.of(policy) is policy


def test_only_environment_and_backend_faults_are_retried() -> None:
    retried = {kind for kind in FailureKind if FailurePolicy().should_retry(kind)}
    assert retried == {FailureKind.ENVIRONMENT, FailureKind.BACKEND}


@pytest.mark.parametrize(
    "limits", [{"max_turns": 0}, {"max_turns": None}, {"chain_seconds": -1}, {"context_length": "8k"}]
)
def test_limits_are_numbers_above_zero(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        ChainLimits(**limits)
