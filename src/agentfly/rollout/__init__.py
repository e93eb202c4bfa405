"""Running chains: `rollout` runs many, `Chain` is one attempt, and the other names are settings."""

from agentfly.rollout.chain import Chain, ChainAgent, ChainSettings
from agentfly.rollout.history import Folding, KeepImages, KeepObservations, StepHistory, Summarize
from agentfly.rollout.limits import ChainLimits, FailurePolicy, LoopControl, RecoveryRule
from agentfly.rollout.scheduler import ChainJob, RunResult, rollout, run_chain, run_chains

__all__ = [
    "Chain",
    "ChainAgent",
    "ChainJob",
    "ChainLimits",
    "ChainSettings",
    "FailurePolicy",
    "Folding",
    "KeepImages",
    "KeepObservations",
    "LoopControl",
    "RecoveryRule",
    "RunResult",
    "StepHistory",
    "Summarize",
    "rollout",
    "run_chain",
    "run_chains",
]
