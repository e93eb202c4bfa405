"""The prebuilt rewards."""

from agentfly.rewards.alfworld import alfworld_episode_reward, alfworld_won
from agentfly.rewards.answers import qa_em, qa_em_format, qa_em_tool, qa_f1, qa_f1_format, qa_f1_tool
from agentfly.rewards.code import output_match, unit_tests
from agentfly.rewards.composition import gate, product
from agentfly.rewards.judging import llm_as_judge_math_reward, llm_as_judge_reward, llm_judge
from agentfly.rewards.shape import answer_format, format_reward, length_reward, think_format
from agentfly.rewards.webshop import webshop_reward

__all__ = [
    "alfworld_episode_reward",
    "alfworld_won",
    "answer_format",
    "format_reward",
    "gate",
    "length_reward",
    "llm_as_judge_math_reward",
    "llm_as_judge_reward",
    "llm_judge",
    "output_match",
    "product",
    "qa_em",
    "qa_em_format",
    "qa_em_tool",
    "qa_f1",
    "qa_f1_format",
    "qa_f1_tool",
    "think_format",
    "unit_tests",
    "webshop_reward",
]
