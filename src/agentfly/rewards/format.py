"""Rewards for how something is said, whatever it says: a format that is kept, a length that is not exceeded.

Give them a small weight beside what the task is about, or make them a gate: alone they are earned by saying nothing.
"""

from __future__ import annotations

import regex

from agentfly.errors import ConfigError, RewardFault
from agentfly.rewards.answers import keeps_format
from agentfly.scoring import Reward, reward
from agentfly.trajectory import Trajectory
from agentfly.types import Message

MATCH_SECONDS = 5.0
"""CPU seconds that a pattern of `format_reward` may take for one reply."""


@reward
def answer_format(prediction: str) -> float:
    """One where the final reply ends with one marked answer, `<answer>…</answer>`, else nothing."""
    return float(keeps_format(prediction))


@reward
def think_format(trajectory: Trajectory) -> dict[str, float]:
    """The part of the model's turns that have one thought, `<think>…</think>`, and then say or do something."""
    turns = [message for message in trajectory.messages if message.role == "assistant"]
    return {"reward": sum(map(thinks, turns)) / len(turns) if turns else 0.0, "turns": float(len(turns))}


def thinks(turn: Message) -> bool:
    """Whether a turn has a thought, set apart by the template or by marks of its own, and something after it."""
    thought, text = turn.thinking, turn.text
    if not thought:
        opening, _, rest = text.partition("<think>")
        thought, closing, text = rest.partition("</think>")
        if opening.strip() or not closing:
            return False
    marked = any(mark in part for mark in ("<think>", "</think>") for part in (thought, text))
    return bool(thought.strip()) and not marked and bool(text.strip() or turn.tool_calls)


def format_reward(pattern: str, name: str = "format_reward") -> Reward:
    """A reward of one where the whole final reply has the form of a regular expression, in which `.` is any sign.

    `regex` matches as `re` does, but releases the GIL and stops: a pattern that backtracks for longer than
    MATCH_SECONDS is a reward fault.
    """
    try:
        form = regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigError(f"{pattern!r:.80} is no regular expression: {error}") from None

    @reward(name=name)
    def formed(prediction: str) -> float:
        try:
            found = form.fullmatch(prediction.strip(), timeout=MATCH_SECONDS, concurrent=True)
        except TimeoutError:
            raise RewardFault(
                f"{pattern!r:.80} took longer than {MATCH_SECONDS:g} s for a reply of {len(prediction)} characters; "
                "write it without repetition inside repetition"
            ) from None
        return float(found is not None)

    return formed


def length_reward(most: int, *, free: int | None = None, name: str = "length_reward") -> Reward:
    """A reward of one for up to `free` sampled tokens, falling evenly to nothing at `most`; None: half of it."""
    free = most // 2 if free is None else free
    if not 0 <= free < most:
        raise ConfigError(
            f"free={free} must be from 0 to below most={most}: the reward falls from the one to the other"
        )

    @reward(name=name)
    def brief(trajectory: Trajectory) -> dict[str, float]:
        tokens = trajectory.sampled_tokens
        part = min(max((most - tokens) / (most - free), 0.0), 1.0)
        return {"reward": part, "tokens": float(tokens)}

    return brief
