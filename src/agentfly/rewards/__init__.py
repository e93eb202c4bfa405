"""The prebuilt rewards."""

from agentfly.rewards.code import output_match, unit_tests

__all__ = ["output_match", "unit_tests"]
