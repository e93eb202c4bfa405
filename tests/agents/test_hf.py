"""Function calling in the model's own format, over real tokenizers."""

import pytest

from agentfly import tool
from agentfly.agents import HFAgent
from agentfly.trajectory import CallStatus, StopReason
from tests.conftest import TOKENIZERS, require_fetched
from tests.fakes import Recording, call, texts


@tool
async def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


@pytest.mark.integration
@pytest.mark.parametrize(("family", "template"), [("qwen2_5", "qwen2.5"), ("qwen3", None)])
async def test_several_calls_per_turn_with_malformed_ones_between(family: str, template: str | None) -> None:
    require_fetched(family)
    script = [
        f"Both at once.\n{call('add', a=1, b=2)}\n{call('add', a='three', b=4)}",
        "<tool_call>\n{not json\n</tool_call>",
        call("subtract", a=1, b=2),
        "The sums are 3 and unknown.",
    ]
    backend = Recording(script)
    agent = HFAgent(str(TOKENIZERS / family), template=template, tools=[add], backend=backend)
    (trajectory,) = await agent.run("Add.")
    assert (trajectory.stop, trajectory.prediction) == (StopReason.ANSWER, "The sums are 3 and unknown.")
    statuses = [c.status for c in trajectory.calls]
    assert statuses[:2] == [CallStatus.OK, CallStatus.INVALID]
    assert statuses[-1] is CallStatus.UNKNOWN
    (segment,) = trajectory.segments
    for request in backend.requests:
        assert list(request.prompt) == segment.tokens.tolist()[: len(request.prompt)]
    model = [text for author, text in texts(agent, trajectory) if author == "model"]
    assert model == [f"{words}<|im_end|>" for words in script]


async def test_the_calls_are_numbered_and_paired_with_their_answers() -> None:
    script = ["\n".join([call("add", a=1, b=1), call("add", a=2, b=2)]), call("add", a=3, b=3), "done"]
    agent = HFAgent("bytes", template="chatml", tools=[add], backend=Recording(script))
    (trajectory,) = await agent.run("Add.")
    call_ids = [c.id for m in trajectory.messages for c in m.tool_calls]
    assert call_ids == ["call00001", "call00002", "call00003"]
    assert [m.tool_call_id for m in trajectory.messages if m.role == "tool"] == call_ids
