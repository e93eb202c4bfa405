"""The prebuilt rewards."""

from agentfly.rewards.alfworld import alfworld_episode_reward, alfworld_won
from agentfly.rewards.code import output_match, unit_tests

__all__ = ["alfworld_episode_reward", "alfworld_won", "output_match", "unit_tests"]
