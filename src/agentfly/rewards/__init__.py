"""The prebuilt rewards."""

from agentfly.rewards.alfworld import alfworld_episode_reward, alfworld_won
from agentfly.rewards.code import output_match, unit_tests
from agentfly.rewards.webshop import webshop_reward

__all__ = ["alfworld_episode_reward", "alfworld_won", "output_match", "unit_tests", "webshop_reward"]
