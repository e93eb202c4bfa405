"""Rewards for format and length."""

from __future__ import annotations

import pytest

from agentfly.agents import HFAgent
from agentfly.errors import ConfigError, RewardFault
from agentfly.rewards import answer_format, format, format_reward, length_reward, overlong_penalty, think_format
from agentfly.rewards.format import has_thinking
from agentfly.scoring import Reward
from agentfly.trajectory import Trajectory
from agentfly.types import Message


def run_script(reward: Reward, *script: str) -> Trajectory:
    agent = HFAgent(
        "bytes",
        tools=["calculate"],
        reward=reward,
        template="chatml",
        backend="scripted",
        backend_config={"script": list(script)},
    )
    return agent.run_sync("How much is it?")[0]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("So: <answer>4</answer>", 1.0),
        ("<answer>4</answer> I think", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>4</answer><answer>5</answer>", 0.0),
        ("4", 0.0),
    ],
)
def test_answer_format_needs_one_answer_at_the_end(text: str, kept: float) -> None:
    assert answer_format(text) == kept


CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "2 + 2"}}</tool_call>'


@pytest.mark.parametrize(
    ("script", "fraction"),
    [
        ([f"<think>I add.</think>{CALL}", "<think>It is 4.</think>4"], 1.0),
        ([CALL, "<think>It is 4.</think>4"], 0.5),
        (["<think></think>4"], 0.0),
        (["<think>4</think>"], 0.0),
        (["4"], 0.0),
    ],
)
def test_think_format_is_the_fraction_of_turns_with_a_thought(script: list[str], fraction: float) -> None:
    assert run_script(think_format, *script).reward == fraction


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (" <think>It is 4.</think>\n4", True),
        ("4 <think>after</think>", False),
        ("<think>a<think>b</think>4", False),
        ("<think>a</think></think>4", False),
        ("<think>" * 100_000, False),
    ],
)
def test_thinking_in_tags_is_recognized(text: str, kept: bool) -> None:
    assert has_thinking(Message("assistant", text)) is kept


def test_custom_format() -> None:
    verdict = format_reward(r"Verdict: (yes|no)\..*", name="verdict")
    assert [verdict(text) for text in ("Verdict: yes.\nBecause.", " Verdict: no. ", "I say yes.")] == [1.0, 1.0, 0.0]
    assert verdict.name == "verdict"
    with pytest.raises(ConfigError, match="is not a regular expression"):
        format_reward("(")


def test_pattern_that_backtracks_without_end_is_a_reward_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "MATCH_SECONDS", 0.1)
    nested = format_reward("(a|aa)+b")
    assert nested("aab") == 1.0
    with pytest.raises(RewardFault, match="for a reply of 200 characters"):
        nested("a" * 200)


def test_length_reward_decreases_linearly() -> None:
    brief = length_reward(100, free=20)
    chains = {length: run_script(brief, "x" * length) for length in (5, 60, 200)}
    tokens = {length: chain.sampled_tokens for length, chain in chains.items()}
    assert chains[5].reward == 1.0
    assert chains[60].reward == pytest.approx((100 - tokens[60]) / 80)
    assert chains[200].reward == 0.0
    assert chains[200].score.metrics["tokens"] == tokens[200]
    for options in ({"max_tokens": 10, "free": 10}, {"max_tokens": 10, "free": -1}, {"max_tokens": 0}):
        with pytest.raises(ConfigError, match="must be from 0 to below max_tokens"):
            length_reward(**options)


def test_overlong_penalty_grows_within_the_buffer() -> None:
    penalty = overlong_penalty(100, buffer=80)
    chains = {length: run_script(penalty, "x" * length) for length in (5, 60, 200)}
    tokens = {length: chain.sampled_tokens for length, chain in chains.items()}
    assert chains[5].reward == 0.0
    assert chains[60].reward == pytest.approx(-(tokens[60] - 20) / 80)
    assert chains[200].reward == -1.0
    for buffer in (0, 101):
        with pytest.raises(ConfigError, match="must be from 1 to max_tokens=100"):
            overlong_penalty(100, buffer=buffer)
