"""The prebuilt rewards."""

from agentfly.rewards.answers import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format, qa_f1_tool
from agentfly.rewards.code import output_match, unit_tests

__all__ = [
    "output_match",
    "qa_em",
    "qa_em_format",
    "qa_em_tool",
    "qa_f1",
    "qa_f1_format",
    "qa_f1_tool",
    "unit_tests",
]
