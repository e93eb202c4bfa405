"""Running chains: `rollout` runs many, `Chain` is one, and the rest is what may be declared about them."""

from agentfly.rollout.chain import Chain, ChainAgent, Settings
from agentfly.rollout.folding import Folding, KeepImages, KeepObservations, Steps, Summarise
from agentfly.rollout.policy import Control, FailurePolicy, Limits, Reaction
from agentfly.rollout.result import RunResult
from agentfly.rollout.scheduling import Job, rollout, run_chain, run_jobs

__all__ = [
    "Chain",
    "ChainAgent",
    "Control",
    "FailurePolicy",
    "Folding",
    "Job",
    "KeepImages",
    "KeepObservations",
    "Limits",
    "Reaction",
    "RunResult",
    "Settings",
    "Steps",
    "Summarise",
    "rollout",
    "run_chain",
    "run_jobs",
]
