"""Rewards for format and length, independent of the content.

Give them a small weight beside the reward of the task, or use them as a gate: alone they can be earned without content.
"""

from __future__ import annotations

import regex

from agentfly.errors import ConfigError, RewardFault
from agentfly.rewards.answers import has_answer_format
from agentfly.scoring import Reward, reward
from agentfly.trajectory import Trajectory
from agentfly.types import Message

MATCH_SECONDS = 5.0
"""CPU seconds that the pattern of a `format_reward` may take for one reply."""


@reward
def answer_format(prediction: str) -> float:
    """1 if the final reply ends with its only marked answer, `<answer>…</answer>`, else 0."""
    return float(has_answer_format(prediction))


@reward
def think_format(trajectory: Trajectory) -> dict[str, float]:
    """The fraction of the model's turns with one thought, `<think>…</think>`, followed by text or a tool call."""
    turns = [message for message in trajectory.messages if message.role == "assistant"]
    return {"reward": sum(map(has_thought, turns)) / len(turns) if turns else 0.0, "turns": float(len(turns))}


def has_thought(turn: Message) -> bool:
    """Whether a turn has one thought, separated by the template or by tags in the text, and something after it."""
    thought, text = turn.thinking, turn.text
    if not thought:
        opening, _, rest = text.partition("<think>")
        thought, closing, text = rest.partition("</think>")
        if opening.strip() or not closing:
            return False
    has_tags = any(tag in part for tag in ("<think>", "</think>") for part in (thought, text))
    return bool(thought.strip()) and not has_tags and bool(text.strip() or turn.tool_calls)


def format_reward(pattern: str, name: str = "format_reward") -> Reward:
    """Create a reward: 1 if the whole final reply matches a regular expression, in which `.` is any character.

    `regex` matches as `re` does, but releases the GIL and has a timeout: a pattern that backtracks for longer than
    MATCH_SECONDS is a reward fault.
    """
    try:
        compiled = regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigError(f"{pattern!r:.80} is not a regular expression: {error}") from None

    @reward(name=name)
    def matches_format(prediction: str) -> float:
        try:
            found = compiled.fullmatch(prediction.strip(), timeout=MATCH_SECONDS, concurrent=True)
        except TimeoutError:
            raise RewardFault(
                f"{pattern!r:.80} took longer than {MATCH_SECONDS:g} s for a reply of {len(prediction)} characters; "
                "write it without repetition inside repetition"
            ) from None
        return float(found is not None)

    return matches_format


def length_reward(most: int, *, free: int | None = None, name: str = "length_reward") -> Reward:
    """Create a reward: 1 for up to `free` sampled tokens (default: half of `most`), then linear to 0 at `most`."""
    free = most // 2 if free is None else free
    if not 0 <= free < most:
        raise ConfigError(
            f"free={free} must be from 0 to below most={most}: between them the reward decreases from 1 to 0"
        )

    @reward(name=name)
    def is_short(trajectory: Trajectory) -> dict[str, float]:
        tokens = trajectory.sampled_tokens
        score = min(max((most - tokens) / (most - free), 0.0), 1.0)
        return {"reward": score, "tokens": float(tokens)}

    return is_short
