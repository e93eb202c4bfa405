"""The JSON form of what a trajectory is made of: it reads back to an equal value, and what it would lose is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.errors import RecordError
from agentfly.outcome import CallRecord, CallStatus, Failure, FailureKind, Score, Turn
from agentfly.types import Finish, Image, Message, Task, ToolCall


def plain(value: Any) -> Any:
    """What a tool or reward returned, with arrays and their scalars as lists and numbers, and tuples as lists.

    Anything else stays as it is, for the user to look at; writing it to JSON refuses it by name.
    """
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def kept(values: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The values as they are, if JSON keeps them so; RecordError names the one that it would lose."""
    for name, value in values.items():
        try:
            same = isinstance(name, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise RecordError(
                f"{what}: {name!r} holds a {type(value).__name__} that JSON cannot keep as it is; "
                "use text, finite numbers, lists and dicts with text keys"
            )
    return dict(values)


def message_to_json(message: Message) -> dict[str, Any]:
    out = message.to_dict()
    if not isinstance(message.content, str):
        out["content"] = [part if isinstance(part, str) else {"image": part.url} for part in message.content]
    if message.tool_calls:
        out["tool_calls"] = [
            [call.name, kept(call.arguments, f"arguments of a call of {call.name!r}"), call.id, call.problem, call.raw]
            for call in message.tool_calls
        ]
    return out


def message_from_json(value: Mapping[str, Any]) -> Message:
    content = value["content"]
    if not isinstance(content, str):
        content = tuple(part if isinstance(part, str) else Image(part["image"]) for part in content)
    return Message(
        value["role"],
        content,
        tuple(ToolCall(*call) for call in value.get("tool_calls", ())),
        value.get("reasoning_content", ""),
        value.get("name", ""),
        value.get("tool_call_id", ""),
    )


def task_to_json(task: Task) -> dict[str, Any]:
    columns = kept(task.columns, f"column of task {task.id!r}")
    return {"messages": [message_to_json(m) for m in task.messages], "columns": columns, "id": task.id}


def task_from_json(value: Mapping[str, Any]) -> Task:
    return Task(tuple(map(message_from_json, value["messages"])), value["columns"], value["id"])


def turn_to_json(turn: Turn) -> list[Any]:
    calls = [
        [c.name, c.status.value, c.seconds, kept(c.info, f"info of tool {c.name!r}"), c.retries] for c in turn.calls
    ]
    return [turn.finish.value, calls, turn.generate_seconds, turn.tool_seconds]


def turn_from_json(value: Sequence[Any]) -> Turn:
    finish, calls, generate_seconds, tool_seconds = value
    records = tuple(CallRecord(name, CallStatus(status), *rest) for name, status, *rest in calls)
    return Turn(Finish(finish), records, generate_seconds, tool_seconds)


def score_to_json(score: Score | None) -> list[Any] | None:
    if score is None:
        return None
    per_turn = None if score.per_turn is None else list(score.per_turn)
    return [score.total, per_turn, kept(score.metrics, "metrics of the reward")]


def score_from_json(value: Sequence[Any] | None) -> Score | None:
    if value is None:
        return None
    total, per_turn, metrics = value
    return Score(total, None if per_turn is None else tuple(per_turn), metrics)


def failure_to_json(failure: Failure) -> list[Any]:
    return [failure.kind.value, failure.message, failure.turn, failure.attempt]


def failure_from_json(value: Sequence[Any]) -> Failure:
    kind, *rest = value
    return Failure(FailureKind(kind), *rest)
