"""Hand-made chains and steps for tests of metrics, alarms and reports."""

from collections.abc import Sequence
from typing import Any

from agentfly.runs import StepRecord
from agentfly.segment import Author, Segment
from agentfly.trajectory import CallRecord, CallStatus, Score, StopReason, Trajectory, TurnRecord
from agentfly.types import Completion, FinishReason, Message, Task


def chain(
    name: str = "0/0",
    reward: float | None = None,
    *,
    metrics: dict[str, Any] | None = None,
    calls: Sequence[CallRecord] = (),
    tokens: int = 3,
    logprob: float = -0.5,
    version: int = 0,
    turns: int = 1,
    per_turn: Sequence[float] | None = None,
    question: str = "How many?",
    says: str = "Seven.",
    **fields: Any,
) -> Trajectory:
    """A finished chain whose only segment has a prompt of four tokens and one reply."""
    group, number = map(int, name.split("/"))
    segment = Segment()
    segment.append(Author.TASK, range(4), [Message("user", question)], turn=0)
    sampled = Completion(
        list(range(tokens)),
        [logprob] * tokens,
        [version] * tokens,
        FinishReason.STOP if tokens else FinishReason.ABORTED,
    )
    segment.append_completion(sampled, Message("assistant", says), turn=0)
    return Trajectory(
        task=Task.of(question, str(group)),
        segments=(segment.seal(),),
        turns=(TurnRecord(FinishReason.STOP, tuple(calls)), *(TurnRecord(FinishReason.STOP) for _ in range(turns - 1))),
        prediction=says,
        group=group,
        chain=number,
        score=None if reward is None else Score(reward, None if per_turn is None else tuple(per_turn), metrics or {}),
        **{"stop": StopReason.ANSWER, **fields},
    )


def call(name: str = "add", status: CallStatus = CallStatus.OK, **fields: Any) -> CallRecord:
    return CallRecord(name, status, **fields)


def step(number: int, reward: float = 0.5, **fields: Any) -> StepRecord:
    """A step that was measured."""
    metrics = {"reward/mean": reward, "chain/turns": 2.0, **fields.pop("metrics", {})}
    return StepRecord(number, 10, metrics, {"generate": 3.0, "update": 1.0}, **fields)
