"""The prebuilt rewards."""

from agentfly.rewards.alfworld import alfworld_episode_reward, alfworld_won
from agentfly.rewards.answers import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format, qa_f1_tool
from agentfly.rewards.code import output_match, unit_tests
from agentfly.rewards.games import game_score, game_won, reasoning_gym_score
from agentfly.rewards.webshop import webshop_reward

__all__ = [
    "alfworld_episode_reward",
    "alfworld_won",
    "game_score",
    "game_won",
    "output_match",
    "qa_em",
    "qa_em_format",
    "qa_em_tool",
    "qa_f1",
    "qa_f1_format",
    "qa_f1_tool",
    "reasoning_gym_score",
    "unit_tests",
    "webshop_reward",
]
