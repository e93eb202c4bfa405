"""Running chains: `rollout` runs many, `Chain` is one attempt, and the other names are settings."""

from agentfly.rollout.branching import Branching
from agentfly.rollout.chain import Chain
from agentfly.rollout.history import Folding, KeepImages, KeepObservations, StepHistory, Summarize
from agentfly.rollout.limits import ChainLimits, FailurePolicy, LoopControl, RecoveryRule
from agentfly.rollout.scheduler import ChainJob, RunResult, rollout, run_chain, run_chains
from agentfly.rollout.settings import ChainAgent, ChainSettings

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
