"""The prebuilt rewards."""

from agentfly.rewards.alfworld import alfworld_episode_reward, alfworld_won
from agentfly.rewards.answers import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format, qa_f1_tool
from agentfly.rewards.code import output_match, unit_tests
from agentfly.rewards.composition import gate, product
from agentfly.rewards.games import game_score, game_won, reasoning_gym_score
from agentfly.rewards.judging import llm_as_judge_math_reward, llm_as_judge_reward, llm_judge
from agentfly.rewards.math import math_equal, math_equal_think, math_equal_think_tool, math_equal_tool
from agentfly.rewards.repair import repaired, tests_pass
from agentfly.rewards.scienceworld import scienceworld_episode_reward, scienceworld_progress, scienceworld_score
from agentfly.rewards.shape import answer_format, format_reward, length_reward, think_format
from agentfly.rewards.shell import shell_match, shell_similarity
from agentfly.rewards.sql import sql_iou, sql_match
from agentfly.rewards.webshop import webshop_reward

__all__ = [
    "alfworld_episode_reward",
    "alfworld_won",
    "answer_format",
    "format_reward",
    "game_score",
    "game_won",
    "gate",
    "length_reward",
    "llm_as_judge_math_reward",
    "llm_as_judge_reward",
    "llm_judge",
    "math_equal",
    "math_equal_think",
    "math_equal_think_tool",
    "math_equal_tool",
    "output_match",
    "product",
    "qa_em",
    "qa_em_format",
    "qa_em_tool",
    "qa_f1",
    "qa_f1_format",
    "qa_f1_tool",
    "reasoning_gym_score",
    "repaired",
    "scienceworld_episode_reward",
    "scienceworld_progress",
    "scienceworld_score",
    "shell_match",
    "shell_similarity",
    "sql_iou",
    "sql_match",
    "tests_pass",
    "think_format",
    "unit_tests",
    "webshop_reward",
]
