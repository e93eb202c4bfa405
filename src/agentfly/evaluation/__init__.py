"""Evaluation: how well an agent does on tasks it was not trained on."""

from agentfly.evaluation.runner import EvalLog, evaluate, validate_counts
from agentfly.evaluation.summary import Evaluation

__all__ = ["EvalLog", "Evaluation", "evaluate", "validate_counts"]
