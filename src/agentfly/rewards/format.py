"""Rewards for format and length, independent of the content.

Give them a small weight beside the reward of the task, or use them as a gate: alone, they reward empty replies.
"""

from __future__ import annotations

import regex

from agentfly.errors import ConfigError, RewardFault
from agentfly.rewards.answers import has_answer_format
from agentfly.scoring import Reward, reward
from agentfly.trajectory import Trajectory
from agentfly.types import Message

MATCH_SECONDS = 5.0
"""Time limit for matching the pattern of `format_reward` against one reply, in CPU seconds."""


@reward
def answer_format(prediction: str) -> float:
    """1 if the final reply ends with its only tagged answer, `<answer>…</answer>`, else 0."""
    return float(has_answer_format(prediction))


@reward
def think_format(trajectory: Trajectory) -> dict[str, float]:
    """Fraction of the model's turns that have one `<think>…</think>` followed by text or a call."""
    turns = [message for message in trajectory.messages if message.role == "assistant"]
    return {"reward": sum(map(has_thinking, turns)) / len(turns) if turns else 0.0, "turns": float(len(turns))}


def has_thinking(turn: Message) -> bool:
    """Whether a turn has thinking, separated by the template or in tags, followed by text or a call."""
    thought = turn.thinking
    text = turn.text
    if not thought:
        opening, _, tagged = text.partition("<think>")
        thought, closing, text = tagged.partition("</think>")
        if opening.strip() or not closing:
            return False
    more_tags = any(tag in section for tag in ("<think>", "</think>") for section in (thought, text))
    return bool(thought.strip()) and not more_tags and bool(text.strip() or turn.tool_calls)


def format_reward(pattern: str, name: str = "format_reward") -> Reward:
    """A reward of 1 if the whole final reply matches a regular expression, in which `.` matches any character.

    The package `regex` matches like `re`, but releases the GIL and has a time limit: a pattern that backtracks for
    longer than MATCH_SECONDS is a reward fault.
    """
    try:
        compiled = regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigError(f"{pattern!r:.80} is not a regular expression: {error}") from None

    @reward(name=name)
    def matches(prediction: str) -> float:
        try:
            match = compiled.fullmatch(prediction.strip(), timeout=MATCH_SECONDS, concurrent=True)
        except TimeoutError:
            raise RewardFault(
                f"{pattern!r:.80} took longer than {MATCH_SECONDS:g} s for a reply of {len(prediction)} characters; "
                "write it without repetition inside repetition"
            ) from None
        return float(match is not None)

    return matches


def length_reward(max_tokens: int, *, free: int | None = None, name: str = "length_reward") -> Reward:
    """A reward of 1 for up to `free` sampled tokens, which falls linearly to 0 at `max_tokens`.

    free: None: half of `max_tokens`.
    """
    free = max_tokens // 2 if free is None else free
    if not 0 <= free < max_tokens:
        raise ConfigError(
            f"free={free} must be from 0 to below max_tokens={max_tokens}: the reward falls between the two"
        )

    @reward(name=name)
    def length(trajectory: Trajectory) -> dict[str, float]:
        tokens = trajectory.sampled_tokens
        score = min(max((max_tokens - tokens) / (max_tokens - free), 0.0), 1.0)
        return {"reward": score, "tokens": float(tokens)}

    return length


def overlong_penalty(max_tokens: int, *, buffer: int, name: str = "overlong_penalty") -> Reward:
    """The soft over-long punishment of DAPO: 0, which falls linearly to −1 over the last `buffer` of `max_tokens`.

    Give `max_tokens` the limit that cuts a chain off. Its weight is 1 in DAPO.
    """
    if not 0 < buffer <= max_tokens:
        raise ConfigError(f"buffer={buffer} must be from 1 to max_tokens={max_tokens}: the penalty grows within it")

    @reward(name=name)
    def penalty(trajectory: Trajectory) -> dict[str, float]:
        tokens = trajectory.sampled_tokens
        return {"reward": -min(max((tokens - max_tokens + buffer) / buffer, 0.0), 1.0), "tokens": float(tokens)}

    return penalty
