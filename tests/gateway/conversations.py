"""A conversation of ten turns with a tool, for clients of every kind, and checks of what was recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agentfly.agents import HFAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.gateway import Gateway
from agentfly.gateway.session import GatewaySession
from agentfly.rollout import ChainLimits, ChainSettings
from agentfly.segment import Author
from agentfly.types import Sampling
from tests.fakes import call

TURNS = 10
SCRIPT = [f"Step {i}.\n{call('add', a=i, b=10)}" for i in range(TURNS - 1)] + ["The sum is 18."]
SCRIPT[3] += f"\n{call('add', a=3, b=20)}"  # two calls in one turn
DESCRIPTION = "Add two integers."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
SETTINGS = ChainSettings(sampling=Sampling(max_tokens=200), limits=ChainLimits(max_turns=50))


@asynccontextmanager
async def serve(script: Any = SCRIPT, *, chunk: int | None = 3, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway over a scripted backend and a tokenizer of bytes."""
    backend = script if not isinstance(script, str | Sequence) and not callable(script) else None
    backend = backend or ScriptedBackend(script, chunk=chunk)
    agent = HFAgent("bytes", template="chatml", backend=backend)
    async with Gateway(agent.backend, agent.load_template, model="scripted", **settings) as gateway:
        yield gateway


def check_ten_turns(session: GatewaySession, *, final: str = "The sum is 18.") -> None:
    """All turns are in one segment, each continues it, and the sampled tokens are the script's."""
    recorder = session.recorder
    assert recorder is not None
    assert (len(recorder.turns), len(recorder.segments)) == (TURNS, 1)
    assert (recorder.continued, recorder.follow_ups) == (TURNS - 1, TURNS - 1)
    assert session.last_message.text == final
    template = session.templates.base
    spans = [span for span in recorder.segments[0].spans if span.author is Author.MODEL]
    assert [template.codec.decode(span.ids.tolist()) for span in spans] == [f"{text}<|im_end|>" for text in SCRIPT]
