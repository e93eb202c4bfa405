"""Rewards for mathematics: whether an answer is equal to the right one, whatever form it is written in.

What is judged is the final reply, without a thought before it: its last `<answer>…</answer>`, or what is boxed in it,
or what it says the answer is, or its last number or formula. They have no time limit of their own: the judge keeps one
for each answer, and waiting for a turn is nobody's fault.
"""

from __future__ import annotations

from agentfly.environments.math.judge import MathJudge
from agentfly.rewards.answers import extract_answer
from agentfly.scoring import reward
from agentfly.segment import Author
from agentfly.trajectory import CallStatus, Trajectory
from agentfly.types import Message

TRIED = 0.1
"""What a call that went well is worth where the answer is wrong, in the rewards that ask for one."""
_OPEN, _CLOSE = "<think>", "</think>"


@reward(timeout=None)
async def math_equal(prediction: str, answer: str | float, judge: MathJudge) -> dict[str, float]:
    """One if the answer equals the column `answer`, else nothing."""
    acc = await _acc(prediction, answer, judge)
    return {"reward": acc, "acc": acc}


@reward(timeout=None)
async def math_equal_tool(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """One if the answer is right and a tool was called before it, a tenth if it is wrong; nothing without a tool."""
    acc, used = await _acc(prediction, answer, judge), float(used_a_tool(trajectory))
    return {"reward": used * max(acc, TRIED), "acc": acc, "used_tool": used}


@reward(timeout=None)
async def math_equal_think(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """One if the answer is right and every reply has a thought, else nothing."""
    acc, thought = await _acc(prediction, answer, judge), float(thinks(trajectory))
    return {"reward": acc * thought, "acc": acc, "thought": thought}


@reward(timeout=None)
async def math_equal_think_tool(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """As `math_equal_tool`, if every reply has a thought; else nothing."""
    acc = await _acc(prediction, answer, judge)
    used, thought = float(used_a_tool(trajectory)), float(thinks(trajectory))
    return {"reward": thought * used * max(acc, TRIED), "acc": acc, "used_tool": used, "thought": thought}


async def _acc(prediction: str, answer: str | float, judge: MathJudge) -> float:
    said = extract_answer(prediction.rpartition(_CLOSE)[2])
    return float(await judge.equal(said, answer))


def used_a_tool(trajectory: Trajectory) -> bool:
    """Whether a call went well in a turn before the last, which is the one that answers."""
    return any(call.status is CallStatus.OK for turn in trajectory.turns[:-1] for call in turn.calls)


def thinks(trajectory: Trajectory) -> bool:
    """Whether every reply of the model's has a thought that says something, and there is one."""
    spans = (span for segment in trajectory.segments for span in segment.spans if span.author is Author.MODEL)
    replies = [message for span in spans for message in span.messages]
    return bool(replies) and all(map(_thinks, replies))


def _thinks(reply: Message) -> bool:
    """Set apart by the model's template, or, where a server renders, still in the text."""
    thought, closed, _ = reply.text.partition(_OPEN)[2].partition(_CLOSE)
    return bool(reply.thinking.strip() or (closed and thought.strip()))
