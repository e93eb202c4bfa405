"""Agents of other packages, unchanged: ten turns with a tool, whole and streamed, in one exact segment, with an answer.

`make full` installs the packages; a test whose package is missing is skipped.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest

from tests.fakes import call
from tests.gateway.conversations import SCRIPT, SETTINGS, check_ten_turns, serve

QUESTION = "Add the numbers from 0 on."


def require(*names: str) -> list[Any]:
    """Import modules, or skip the test."""
    return [pytest.importorskip(name, reason=f"needs {name}: make full") for name in names]


WHOLE_AND_STREAMED = pytest.mark.parametrize("stream", [False, True])


@WHOLE_AND_STREAMED
async def test_openai_agents_over_both_apis(stream: bool) -> None:
    agents, openai = require("agents", "openai")
    agents.set_tracing_disabled(True)

    @agents.function_tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)

    for model_class in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        async with serve() as gateway:
            key, session = await gateway.open_session(SETTINGS)
            async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as client:
                model = model_class(model="any", openai_client=client)
                agent = agents.Agent(name="adder", instructions="Be brief.", model=model, tools=[add])
                if stream:
                    result = agents.Runner.run_streamed(agent, QUESTION, max_turns=20)
                    assert [event async for event in result.stream_events()]
                else:
                    result = await agents.Runner.run(agent, QUESTION, max_turns=20)
            assert result.final_output == "The sum is 18."
            check_ten_turns(session)


@WHOLE_AND_STREAMED
async def test_smolagents(stream: bool) -> None:
    (smolagents,) = require("smolagents")

    @smolagents.tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """Add two integers.

        Args:
            a: The first.
            b: The second.
        """
        return str(a + b)

    script = [*SCRIPT[:-1], call("final_answer", answer="18")]
    async with serve(script) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        model = smolagents.OpenAIModel(model_id="any", api_base=gateway.base_url, api_key=key)
        agent = smolagents.ToolCallingAgent(
            tools=[add], model=model, max_steps=20, verbosity_level=0, stream_outputs=stream
        )
        assert await asyncio.to_thread(agent.run, QUESTION) == "18"
        model.client.close()
        recorder = session.recorder
        assert recorder is not None
        assert (len(recorder.turns), len(recorder.segments)) == (10, 1)
        assert (recorder.continued, recorder.follow_ups) == (9, 9)


@WHOLE_AND_STREAMED
async def test_langgraph(stream: bool) -> None:
    prebuilt, langchain_openai, tools = require("langgraph.prebuilt", "langchain_openai", "langchain_core.tools")
    (openai,) = require("openai")

    @tools.tool  # type: ignore[untyped-decorator]
    def add(a: int, b: int) -> str:
        """Add two integers."""
        return str(a + b)

    async with serve() as gateway, openai.DefaultAsyncHttpxClient() as http:
        key, session = await gateway.open_session(SETTINGS)
        model = langchain_openai.ChatOpenAI(
            model="any", base_url=gateway.base_url, api_key=key, max_retries=0, http_async_client=http
        )
        agent = prebuilt.create_react_agent(model, [add], prompt="Be brief.")
        state_in: Any = {"messages": [("user", QUESTION)]}
        text = ""
        if stream:
            async for chunk, info in agent.astream(state_in, {"recursion_limit": 50}, stream_mode="messages"):
                text += str(chunk.content) if info["langgraph_node"] == "agent" else ""
        else:
            state = await agent.ainvoke(state_in, {"recursion_limit": 50})
            text = state["messages"][-1].content
        assert text.endswith("The sum is 18.")
        check_ten_turns(session)


@WHOLE_AND_STREAMED
async def test_pydantic_ai(stream: bool) -> None:
    _, openai = require("pydantic_ai", "openai")
    from pydantic_ai import Agent

    models = importlib.import_module("pydantic_ai.models.openai")
    providers = importlib.import_module("pydantic_ai.providers.openai")
    async with serve() as gateway, openai.DefaultAsyncHttpxClient() as http:
        key, session = await gateway.open_session(SETTINGS)
        client = openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0, http_client=http)
        provider = providers.OpenAIProvider(openai_client=client)
        agent = Agent(models.OpenAIChatModel("any", provider=provider), instructions="Be brief.")

        @agent.tool_plain
        def add(a: int, b: int) -> str:
            """Add two integers."""
            return str(a + b)

        seen: list[Any] = []

        async def handle(_: Any, events: Any) -> None:
            seen.extend([event async for event in events])

        # `run_stream` takes the first text for the answer; a handler of events streams every turn.
        result = await agent.run(QUESTION, event_stream_handler=handle if stream else None)
        assert result.output == "The sum is 18."
        assert bool(seen) == stream
        check_ten_turns(session)
