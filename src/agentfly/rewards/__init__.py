"""The prebuilt rewards."""

from agentfly.rewards.code import output_match, unit_tests
from agentfly.rewards.webshop import webshop_reward

__all__ = ["output_match", "unit_tests", "webshop_reward"]
