"""The prebuilt rewards."""

from agentfly.rewards.alfworld import alfworld_episode_reward, alfworld_won
from agentfly.rewards.answers import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format, qa_f1_tool
from agentfly.rewards.code import output_match, unit_tests
from agentfly.rewards.shell import shell_match, shell_similarity
from agentfly.rewards.sql import sql_iou, sql_match
from agentfly.rewards.webshop import webshop_reward

__all__ = [
    "alfworld_episode_reward",
    "alfworld_won",
    "output_match",
    "qa_em",
    "qa_em_format",
    "qa_em_tool",
    "qa_f1",
    "qa_f1_format",
    "qa_f1_tool",
    "shell_match",
    "shell_similarity",
    "sql_iou",
    "sql_match",
    "unit_tests",
    "webshop_reward",
]
