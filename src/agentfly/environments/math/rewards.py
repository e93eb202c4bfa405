"""Rewards for mathematics: whether an answer equals the right one, in any notation.

The answer is taken from the final reply without its thoughts: the last `<answer>…</answer>`, the last box, what follows
"the answer is", or the last number or formula. The rewards have no time limit of their own: the judge limits the time
of each answer, and waiting for the judge is not counted.
"""

from __future__ import annotations

from agentfly.environments.math.judge import MathJudge
from agentfly.rewards.answers import extract_answer
from agentfly.scoring import reward
from agentfly.segment import Author
from agentfly.trajectory import CallStatus, Trajectory

TOOL_CREDIT = 0.1
"""Reward of a wrong answer after a successful tool call, in the rewards that require one."""
_OPEN, _CLOSE = "<think>", "</think>"


@reward(timeout=None)
async def math_equal(prediction: str, answer: str | float, judge: MathJudge) -> dict[str, float]:
    """1 if the answer equals the column `answer`, else 0."""
    accuracy = await _accuracy(prediction, answer, judge)
    return {"reward": accuracy, "acc": accuracy}


@reward(timeout=None)
async def math_equal_tool(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """1 if the answer is right and a tool was called before it, 0.1 if it is wrong; 0 without a tool call."""
    accuracy = await _accuracy(prediction, answer, judge)
    used_tool = float(called_tool(trajectory))
    return {"reward": used_tool * max(accuracy, TOOL_CREDIT), "acc": accuracy, "used_tool": used_tool}


@reward(timeout=None)
async def math_equal_think(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """1 if the answer is right and every reply has a thought, else 0."""
    accuracy = await _accuracy(prediction, answer, judge)
    thought = float(has_thoughts(trajectory))
    return {"reward": accuracy * thought, "acc": accuracy, "thought": thought}


@reward(timeout=None)
async def math_equal_think_tool(
    prediction: str, answer: str | float, trajectory: Trajectory, judge: MathJudge
) -> dict[str, float]:
    """The reward of `math_equal_tool` if every reply has a thought, else 0."""
    accuracy = await _accuracy(prediction, answer, judge)
    used_tool, thought = float(called_tool(trajectory)), float(has_thoughts(trajectory))
    score = thought * used_tool * max(accuracy, TOOL_CREDIT)
    return {"reward": score, "acc": accuracy, "used_tool": used_tool, "thought": thought}


async def _accuracy(prediction: str, answer: str | float, judge: MathJudge) -> float:
    return float(await judge.equal(extract_answer(prediction.rpartition(_CLOSE)[2]), answer))


def called_tool(trajectory: Trajectory) -> bool:
    """Whether a call succeeded in a turn before the last one, which answers."""
    return any(call.status is CallStatus.OK for turn in trajectory.turns[:-1] for call in turn.calls)


def has_thoughts(trajectory: Trajectory) -> bool:
    """Whether there are replies of the model and each has a thought.

    The template separates the thought; if a server renders the messages, it is still in the text.
    """
    spans = [span for segment in trajectory.segments for span in segment.spans if span.author is Author.MODEL]
    replies = [message for span in spans for message in span.messages]
    for reply in replies:
        thought, closed, _ = reply.text.partition(_OPEN)[2].partition(_CLOSE)
        if not reply.thinking.strip() and not (closed and thought.strip()):
            return False
    return bool(replies)
