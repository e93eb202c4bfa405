"""Running chains: `rollout` runs many, `Chain` is one attempt, and the other names are settings."""

from agentfly.rollout.chain import Chain
from agentfly.rollout.config import ChainAgent, ChainSettings
from agentfly.rollout.history import Branching, Folding, KeepImages, KeepObservations, StepHistory, Summarize
from agentfly.rollout.limits import ChainLimits, FailurePolicy, LoopControl, RecoveryRule
from agentfly.rollout.scheduler import ChainJob, RunResult, rollout, run_chain, run_chains

__all__ = [
    "Branching",
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
