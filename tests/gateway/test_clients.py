"""The genuine clients of OpenAI and Anthropic: ten turns with a tool, whole and streamed, in one exact segment."""

import json
from typing import Any

import pytest

from agentfly.types import FinishReason
from tests.gateway.conversations import DESCRIPTION, PARAMETERS, SETTINGS, check_ten_turns, serve

FUNCTION = {"type": "function", "function": {"name": "add", "description": DESCRIPTION, "parameters": PARAMETERS}}


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(stream: bool, openai: Any) -> None:
    async with serve() as gateway:
        key, session = await gateway.open_session(SETTINGS, name="0/0")
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}]
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as client:
            while True:
                request = {"model": "any", "messages": messages, "tools": [FUNCTION]}
                if stream:
                    async with client.chat.completions.stream(**request) as events:
                        async for _ in events:
                            pass
                        choice = (await events.get_final_completion()).choices[0]
                else:
                    choice = (await client.chat.completions.create(**request)).choices[0]
                messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
                if not choice.message.tool_calls:
                    break
                assert choice.finish_reason == "tool_calls"
                for call in choice.message.tool_calls:
                    arguments = json.loads(call.function.arguments)
                    result = str(arguments["a"] + arguments["b"])
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        assert choice.finish_reason == "stop"
        check_ten_turns(session)
        await gateway.close_session(key)
        assert gateway.metrics()["continued"] == 1.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chained", [False, True])
async def test_responses(stream: bool, chained: bool, openai: Any) -> None:
    async with serve() as gateway:
        key, session = await gateway.open_session(SETTINGS, name="0/0")
        items: list[Any] = [{"role": "user", "content": "Add."}]
        tool = {"type": "function", **FUNCTION["function"], "strict": False}  # type: ignore[dict-item]
        previous = openai.omit
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as client:
            while True:
                request = {"model": "any", "input": items, "tools": [tool], "instructions": "Be brief."}
                request["previous_response_id"] = previous
                if stream:
                    async with client.responses.stream(**request) as events:
                        async for _ in events:
                            pass
                        response = await events.get_final_response()
                else:
                    response = await client.responses.create(**request)
                results = []
                for item in response.output:
                    if item.type == "function_call":
                        arguments = json.loads(item.arguments)
                        output = str(arguments["a"] + arguments["b"])
                        results.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
                if not results:
                    break
                if chained:
                    previous, items = response.id, results
                else:
                    items += [*(item.model_dump(exclude={"parsed_arguments"}) for item in response.output), *results]
        assert response.output_text == "The sum is 18."
        check_ten_turns(session)


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(stream: bool, anthropic: Any) -> None:
    async with serve() as gateway:
        key, session = await gateway.open_session(SETTINGS, name="0/0")
        messages: list[Any] = [{"role": "user", "content": "Add."}]
        tools = [{"name": "add", "description": DESCRIPTION, "input_schema": PARAMETERS}]
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
            while True:
                request = {
                    "model": "any",
                    "messages": messages,
                    "tools": tools,
                    "max_tokens": 200,
                    "system": "Be brief.",
                }
                if stream:
                    async with client.messages.stream(**request) as events:
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(**request)
                messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
                results = [
                    {"type": "tool_result", "tool_use_id": b.id, "content": str(b.input["a"] + b.input["b"])}
                    for b in reply.content
                    if b.type == "tool_use"
                ]
                if not results:
                    break
                messages.append({"role": "user", "content": results})
        assert reply.stop_reason == "end_turn"
        check_ten_turns(session)


async def test_token_ids_and_log_probabilities_are_returned(openai: Any) -> None:
    async with (
        serve("Hello.", api_key="", record=False) as gateway,
        openai.AsyncOpenAI(base_url=gateway.base_url, api_key="any") as client,
    ):
        reply = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        choice = reply.choices[0]
        template = gateway.templates.base
        assert template.codec.decode(choice.token_ids) == "Hello.<|im_end|>"
        assert reply.prompt_token_ids == template.start([{"role": "user", "content": "Hi"}])
        assert [entry.logprob for entry in choice.logprobs.content] == [-0.1] * len(choice.token_ids)
        include = ["message.output_text.logprobs"]
        for stream in (False, True):
            answer = await client.responses.create(
                model="m", input="Hi", include=include, stream=stream, extra_body={"return_token_ids": True}
            )
            if stream:
                answer = [event async for event in answer][-1].response
            assert answer.token_ids == choice.token_ids
            assert [entry.logprob for entry in answer.output[0].content[0].logprobs] == [-0.1] * len(choice.token_ids)
        assert (await client.models.list()).data[0].id == "scripted"


async def test_a_cut_turn_is_reported_in_each_api(openai: Any, anthropic: Any) -> None:
    async with serve(["Hello, world."] * 3) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        user: Any = {"role": "user", "content": "Hi"}
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as client:
            chat = await client.chat.completions.create(model="m", messages=[user], max_tokens=5)
            assert (chat.choices[0].finish_reason, chat.choices[0].message.content) == ("length", "Hello")
            response = await client.responses.create(model="m", input=[user], max_output_tokens=5)
            assert response.incomplete_details.reason == "max_output_tokens"
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0) as client:
            reply = await client.messages.create(model="m", messages=[user], max_tokens=5)
            assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 5)
        assert [turn.finish for turn in session.recorder.turns] == [FinishReason.LENGTH] * 3
