"""What is stored beside a trajectory, so that chains are filtered without decoding their tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from agentfly.trajectory import CallStatus, Trajectory
from agentfly.types import Message

MAX_TEXT = 100_000
"""Characters of a chain that are searched."""


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """The figures, names and words of a chain that the viewer filters by."""

    group: int
    chain: int
    task: str
    """Id of the task."""
    digest: str
    """Hash of the id and the text of the task, the same for one task in all runs and evaluations."""
    reward: float | None
    stop: str
    treatment: str
    failures: list[str]
    """The kinds of its failures."""
    tools: list[str]
    """Names of the tools that were called, in the order of their first calls."""
    turns: int
    calls: int
    failed_calls: int
    """Calls with any status other than `ok`."""
    sampled_tokens: int
    tokens: int
    seconds: float
    text: str
    """The final answer, and the texts of all messages."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """Summarize a chain."""
        calls = list(trajectory.calls)
        failures = {failure.kind.value for failure in trajectory.failures}
        if trajectory.stop.failure is not None:
            failures.add(trajectory.stop.failure.value)
        # Ids are row numbers in a dataset without ids, so the text is part of the digest. Images are not: a run stores
        # them by reference.
        task = [str(trajectory.task.id), *(text for message in trajectory.task.messages for text in _texts(message))]
        return cls(
            group=trajectory.group,
            chain=trajectory.chain,
            task=task[0],
            digest=hashlib.sha256(json.dumps(task).encode()).hexdigest()[:16],
            reward=trajectory.reward,
            stop=trajectory.stop.value,
            treatment=trajectory.treatment.value,
            failures=sorted(failures),
            tools=list(dict.fromkeys(call.name for call in calls)),
            turns=len(trajectory.turns),
            calls=len(calls),
            failed_calls=sum(call.status is not CallStatus.OK for call in calls),
            sampled_tokens=sum(segment.num_sampled_tokens for segment in trajectory.segments),
            tokens=sum(map(len, trajectory.segments)),
            seconds=trajectory.seconds,
            # The answer first: it is what a preview shows.
            text="\n".join([trajectory.prediction, *_words(trajectory)])[:MAX_TEXT],
        )


def _texts(message: Message) -> list[str]:
    """The texts of a message without its images."""
    if isinstance(message.content, str):
        return [message.content]
    return [text for text in message.content if isinstance(text, str)]


def _words(trajectory: Trajectory) -> Iterator[str]:
    """The id of the task, content, thinking and tool calls of all messages, and the messages of failures."""
    yield str(trajectory.task.id)
    for segment in trajectory.segments:
        for message in segment.messages:
            yield " ".join(_texts(message))
            yield message.thinking
            for call in message.tool_calls:
                yield f"{call.name} {json.dumps(dict(call.arguments), ensure_ascii=False)} {call.problem}"
    for failure in trajectory.failures:
        yield failure.message
