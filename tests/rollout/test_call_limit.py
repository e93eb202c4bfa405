"""The limit on tool calls in one reply: calls within it run, the first one above it is answered with the limit."""

from typing import Any

import pytest

from agentfly import tool
from agentfly.agents import HFAgent
from agentfly.errors import ConfigError
from agentfly.rollout.limits import ChainLimits
from agentfly.templates.parsers.registry import PARSERS
from agentfly.trajectory import CallStatus, FailureKind, StopReason
from agentfly.types import MAX_CALLS, Completion, FinishReason, Message, ToolCall
from tests.fakes import Server, byte_agent, call, complete_with

MANY = 4000
LIMIT = ChainLimits().max_calls_per_turn


@pytest.fixture
def ran() -> list[int]:
    return []


@pytest.fixture
def count(ran: list[int]) -> Any:
    @tool
    async def count(a: int) -> str:
        """Count."""
        ran.append(a)
        return f"counted {a}"

    return count


async def test_calls_above_the_limit_are_answered_and_not_run(count: Any, ran: list[int]) -> None:
    replies = ["".join(call("count", a=number) for number in range(MANY)), "done"]
    result = await byte_agent(replies, tools=[count]).run("Go.", sampling={"max_tokens": None})
    (trajectory,) = result
    answers = [message for message in trajectory.messages if message.role == "tool"]
    assert ran == list(range(LIMIT))
    assert [answer.text for answer in answers[:2]] == ["counted 0", "counted 1"]
    assert len(answers) == LIMIT + 1
    assert answers[-1].text == (
        f"Error: at most {LIMIT} tool calls are run per reply. This call and all calls after it were not run."
    )
    assert [call.status for call in trajectory.calls] == [CallStatus.OK] * LIMIT + [CallStatus.INVALID]
    assert result.metrics["calls/invalid_rate"] == 1 / (LIMIT + 1)
    assert trajectory.stop is StopReason.ANSWER


async def test_every_call_of_the_history_has_one_answer(count: Any) -> None:
    calls = tuple(ToolCall("count", {"a": number}, f"id{number}") for number in range(MANY))
    many = Completion((), (), (), FinishReason.STOP, message=Message("assistant", "", calls))
    backend = Server(complete_with(many, "done"))
    await HFAgent("m", tools=[count], backend=backend).run("Go.", max_calls_per_turn=2)
    assistant, *answers = backend.requests[1].messages[1:]
    assert (
        [call.id for call in assistant.tool_calls]
        == [answer.tool_call_id for answer in answers]
        == ["id0", "id1", "id2"]
    )
    assert [answer.text for answer in answers[:2]] == ["counted 0", "counted 1"]
    assert answers[2].text.startswith("Error: at most 2 tool calls")


async def test_replies_above_the_limit_end_the_chain_as_other_invalid_calls_do(count: Any) -> None:
    reply = "".join(call("count", a=number) for number in range(3))
    (trajectory,) = await byte_agent([reply] * 9, tools=[count]).run("Go.", max_calls_per_turn=2)
    assert trajectory.stop is StopReason.INVALID_CALL
    assert trajectory.stop.failure is FailureKind.PARSE
    assert len(trajectory.turns) == 4


async def test_a_chain_that_ends_skips_the_call_above_the_limit() -> None:
    @tool(ends_chain=True)
    async def finish(answer: str) -> str:
        """Give the answer."""
        return answer

    reply = call("finish", answer="4") + call("finish", answer="5")
    (trajectory,) = await byte_agent([reply], tools=[finish]).run("Go.", max_calls_per_turn=1)
    assert (trajectory.stop, trajectory.prediction) == (StopReason.TOOL_END, "4")
    assert [call.status for call in trajectory.calls] == [CallStatus.OK, CallStatus.SKIPPED]


@pytest.mark.parametrize("value", [0, None, MAX_CALLS + 1, 2.0, True])
def test_call_limit_outside_its_range_is_rejected(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_calls_per_turn"):
        ChainLimits(max_calls_per_turn=value)


@pytest.mark.parametrize(
    ("parser", "one"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("harmony", "<|start|>assistant<|channel|>commentary to=functions.f <|message|>{}<|call|>"),
    ],
)
def test_parsers_stop_after_the_most_calls_and_keep_the_rest_as_text(parser: str, one: str) -> None:
    reply = PARSERS[parser](one * MANY)
    assert len(reply.calls) == MAX_CALLS + 1
    assert reply.message.text.count(one) == MANY - MAX_CALLS - 1
    assert reply.problems == (f"there are more than {MAX_CALLS} calls; what follows them was not read",)
    assert not PARSERS[parser](one * MAX_CALLS).problems
