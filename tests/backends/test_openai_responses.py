"""Responses that violate the protocol, from a real server on loopback: retried, reported, and limited in size."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.backends.base import Request
from agentfly.backends.client import ClientBackend
from agentfly.errors import BackendFault, ConfigError
from agentfly.trajectory import StopReason
from agentfly.types import Message, Sampling
from tests.backends.openai_server import OpenAIServer, Reply, chat, completion, event, says, sends, streams

PATHS = {"tokens": "/completions", "messages": "/chat/completions"}
GOOD = {"tokens": completion(), "messages": chat({"content": "Hello"}, ids=[7, 8], logprobs=[-1, -1], prompt=[1])}
DEEP = b"[" * 500_000
PACKED = gzip.compress(json.dumps(completion()).encode())
PICTURE = b"\x89PNG" + bytes(20)


def client(server: OpenAIServer, speaks: str, **settings: Any) -> ClientBackend:
    client_settings = {"backoff": 0.001, "context_length": 100, **settings}
    return ClientBackend("tiny", server.url, prompt_format=speaks, **client_settings)


def ask(**fields: Any) -> Request:
    return Request(prompt=[1, 2], sampling=Sampling(max_tokens=16), messages=(Message("user", "Hi"),), **fields)


def call(function: object) -> dict[str, Any]:
    return chat({"tool_calls": [{"id": "c", "type": "function", "function": function}]})


MALFORMED = [
    pytest.param("tokens", sends(DEEP), "not JSON", id="deep JSON"),
    pytest.param("tokens", sends(b'{"choices": ' + DEEP), "not JSON", id="deep choices"),
    pytest.param("tokens", sends(b"not gzip", content_encoding="gzip"), "gzip data is corrupt", id="corrupt gzip"),
    pytest.param("tokens", sends(PACKED[:-9], content_encoding="gzip"), "gzip data is incomplete", id="cut gzip"),
    pytest.param("tokens", sends(PACKED, content_encoding="br"), "content-encoding 'br'", id="another encoding"),
    pytest.param("tokens", says([]), "not a JSON object", id="a list"),
    pytest.param("tokens", says({"choices": []}), "no choice", id="no choice"),
    pytest.param("tokens", says({"choices": {}}), "choices: .* list", id="choices"),
    pytest.param("tokens", says({"choices": [[]]}), "choices.0", id="choice"),
    pytest.param("tokens", says(completion(None, token_ids=7)), "token_ids: .* list", id="one id"),
    pytest.param("tokens", says(completion(["7", "8"])), "token_ids.0: .* integer", id="text ids"),
    pytest.param("tokens", says(completion([7, True])), "token_ids.1: .* integer", id="boolean id"),
    pytest.param("tokens", says(completion([7, 8.5])), "token_ids.1: .* integer", id="float id"),
    pytest.param("tokens", says(completion([7, -1])), "token_ids.1", id="negative id"),
    pytest.param("tokens", says(completion([7, 2**31])), "token_ids.1", id="id of 32 bits"),
    pytest.param("tokens", says(completion([7, 300])), "id 300, .* outside the vocabulary of 300", id="unknown id"),
    pytest.param("tokens", says(completion(logprobs=[-1, 0.5])), "token_logprobs.1: .* less than", id="positive"),
    pytest.param("tokens", says(completion(logprobs=[-1, "-1"])), "token_logprobs.1: .* number", id="text logprob"),
    pytest.param("tokens", says(completion(logprobs=[-1, True])), "token_logprobs.1: .* number", id="boolean logprob"),
    pytest.param("tokens", says(completion(logprobs=[-1, -1e300])), "token_logprobs.1", id="infinite in float32"),
    *(
        pytest.param(
            "tokens", sends(json.dumps(completion(logprobs=[-1, value])).encode()), "finite|less than", id=name
        )
        for name, value in {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}.items()
    ),
    pytest.param("tokens", says(completion(logprobs=None, finish="stop") | {"choices": 5}), "choices", id="number"),
    pytest.param("tokens", says(completion(finish=["stop"])), "finish_reason: .* string", id="finish"),  # type: ignore[arg-type]
    pytest.param("messages", says({"choices": [{"message": []}]}), "choices.0.message", id="message"),
    pytest.param("messages", says(chat({"content": 3})), "message.content", id="content"),
    pytest.param("messages", says(chat({"tool_calls": 3})), "message.tool_calls: .* list", id="tool calls"),
    pytest.param("messages", says(chat({"tool_calls": ["add"]})), "message.tool_calls.0", id="text call"),
    pytest.param("messages", says(call(3)), "tool_calls.0.function", id="function"),
    pytest.param("messages", says(call({"name": ["add"]})), "function.name", id="name"),
    pytest.param("messages", says(call({"name": "add", "arguments": [1]})), "function.arguments", id="arguments"),
    pytest.param("messages", says(chat({"content": "x"}, ids=[300], logprobs=[-1], prompt=[1])), "300", id="chat id"),
    pytest.param("messages", says(chat({"content": "x"}, ids=[7], logprobs=[-1], prompt=[300])), "300", id="prompt id"),
    pytest.param(
        "messages", says(chat({"content": "x"}, ids=[7], logprobs=[1], prompt=[1])), "logprob", id="chat logp"
    ),
    pytest.param("messages", says({"data": {}}, 200), "no message", id="another object"),
]


@pytest.mark.parametrize(("speaks", "reply", "words"), MALFORMED)
async def test_malformed_response_is_retried_and_reported(
    openai_server: OpenAIServer, speaks: str, reply: Reply, words: str
) -> None:
    backend, path = client(openai_server, speaks, vocab_size=300, retries=1), PATHS[speaks]
    openai_server.answers(path, reply, says(GOOD[speaks]))
    assert list((await backend.generate(ask())).token_ids) == [7, 8]
    openai_server.answers(path, reply)
    with pytest.raises(BackendFault, match=rf"(?s)(?:{words}).*\(asked 2 times\)"):
        await backend.generate(ask())
    assert len(openai_server.bodies(path)) == 4


@pytest.mark.parametrize("listed", [{"data": 5}, {"data": ["tiny"]}, {"data": [{"id": "tiny", "max_model_len": "4"}]}])
async def test_malformed_model_list_is_retried_and_reported(openai_server: OpenAIServer, listed: object) -> None:
    openai_server.answers("/models", says(listed))
    with pytest.raises(BackendFault, match=r"malformed: data.*asked 2 times"):
        await client(openai_server, "tokens", context_length=None, retries=1).generate(ask())


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(completion([300], [-1.0], "stop"), id="id"),
        pytest.param(completion([True], [-1.0], "stop"), id="boolean"),
        pytest.param(completion([7], [0.5], "stop"), id="logprob"),
    ],
)
async def test_malformed_event_ends_a_stream_even_with_its_finish_reason(
    openai_server: OpenAIServer, last: object
) -> None:
    openai_server.answers("/completions", streams(event(completion([7], [-1.0], None)), event(last)))
    backend = client(openai_server, "tokens", vocab_size=300)
    with pytest.raises(BackendFault, match="broke off after 1 tokens"):
        await backend.generate(ask(on_tokens=lambda ids: None))


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"a":' * 500 + "1" + "}" * 500,
        "[" * 900 + "]" * 900,
    ],
)
async def test_call_arguments_that_cannot_be_stored_are_a_problem_of_the_call(
    openai_server: OpenAIServer, arguments: str
) -> None:
    openai_server.answers("/chat/completions", says(call({"name": "add", "arguments": arguments})))
    message = (await client(openai_server, "messages").generate(ask())).message
    assert message is not None
    assert message.tool_calls[0].arguments == {}
    assert message.tool_calls[0].problem.startswith("its arguments are not JSON")


async def test_long_error_under_status_200_is_cut(openai_server: OpenAIServer) -> None:
    openai_server.answers("/completions", says({"error": {"message": "x" * 1_000_000}}))
    with pytest.raises(BackendFault) as caught:
        await client(openai_server, "tokens").generate(ask())
    assert len(str(caught.value)) < 1000


async def test_streamed_call_arguments_must_be_text(openai_server: OpenAIServer) -> None:
    pieces = [{"index": 0, "function": {"name": "add", "arguments": {"a": 1}}}]
    reply = event({"choices": [{"delta": {"content": "x", "tool_calls": pieces}, "finish_reason": "stop"}]})
    openai_server.answers("/chat/completions", streams(reply))
    with pytest.raises(BackendFault, match=r"broke off after 1 deltas: .* not as text"):
        await client(openai_server, "messages", exact=False).generate(ask(on_text=lambda text: None))


async def test_rounding_above_zero_is_accepted(openai_server: OpenAIServer) -> None:
    openai_server.answers("/completions", says(completion(logprobs=[1e-6, 0])))
    assert list((await client(openai_server, "tokens").generate(ask())).logprobs) == [1e-6, 0]


async def test_compressed_response_is_read(openai_server: OpenAIServer) -> None:
    openai_server.answers("/completions", sends(PACKED[:20], PACKED[20:], content_encoding="gzip"))
    assert list((await client(openai_server, "tokens").generate(ask())).token_ids) == [7, 8]
    assert openai_server.seen[0].headers["accept-encoding"] == "gzip"


async def test_message_with_text_parts_is_read(openai_server: OpenAIServer) -> None:
    blocks = [{"type": "text", "text": "It is "}, {"type": "text", "text": "42."}]
    openai_server.answers("/chat/completions", says(chat({"content": blocks})))
    done = await client(openai_server, "messages").generate(ask())
    assert done.message == Message("assistant", "It is 42.")


async def test_response_cannot_name_a_local_file(openai_server: OpenAIServer, tmp_path: Path) -> None:
    (tmp_path / "private.png").write_bytes(PICTURE)
    blocks = [{"type": "image", "image": str(tmp_path / "private.png")}]
    openai_server.answers("/chat/completions", says(chat({"content": blocks})))
    with pytest.raises(BackendFault, match="malformed"):
        await client(openai_server, "messages", retries=0).generate(ask())


async def test_deeply_nested_arguments_are_a_problem_of_the_call(openai_server: OpenAIServer) -> None:
    openai_server.answers("/chat/completions", says(call({"name": "add", "arguments": DEEP.decode()})))
    done = await client(openai_server, "messages").generate(ask())
    assert done.message is not None
    assert "not JSON" in done.message.tool_calls[0].problem


# The size of a response.


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("speaks", ["tokens", "messages"])
async def test_oversized_response_is_cut_off(openai_server: OpenAIServer, speaks: str, status: int) -> None:
    openai_server.answers(PATHS[speaks], sends(b'{"choices": [', b"0, " * 10_000, status=status, repeat=300))
    with pytest.raises(BackendFault, match="larger than max_response_bytes="):
        await client(openai_server, speaks, max_response_bytes=100_000, retries=0).generate(ask())


async def test_oversized_stream_is_cut_off(openai_server: OpenAIServer) -> None:
    openai_server.answers(
        "/completions", sends(b"data: [", b"0, " * 10_000, repeat=300, content_type="text/event-stream")
    )
    with pytest.raises(BackendFault, match="larger than max_response_bytes=100,000"):
        await client(openai_server, "tokens", max_response_bytes=100_000, retries=0).generate(ask())


async def test_gzip_bomb_takes_no_more_memory_than_the_limit(openai_server: OpenAIServer) -> None:
    limit = 1 << 20
    bomb = gzip.compress(bytes(100 << 20))
    openai_server.answers("/completions", sends(bomb, content_encoding="gzip"))
    backend = client(openai_server, "tokens", max_response_bytes=limit, retries=0)
    tracemalloc.start()
    try:
        with pytest.raises(BackendFault, match="larger than max_response_bytes=1,048,576"):
            await backend.generate(ask())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * limit


@pytest.mark.parametrize("packed", [False, True])
async def test_limit_itself_is_allowed(openai_server: OpenAIServer, packed: bool) -> None:
    body = json.dumps(completion()).encode()
    reply = sends(gzip.compress(body), content_encoding="gzip") if packed else sends(body)
    openai_server.answers("/completions", reply)
    exact = client(openai_server, "tokens", max_response_bytes=len(body), retries=0)
    assert list((await exact.generate(ask())).token_ids) == [7, 8]
    less = client(openai_server, "tokens", max_response_bytes=len(body) - 1, retries=0)
    with pytest.raises(BackendFault, match="larger than"):
        await less.generate(ask())


async def test_error_status_counts_even_where_its_body_cannot_be_read(openai_server: OpenAIServer) -> None:
    openai_server.answers("/completions", sends(b"not gzip", status=401, content_encoding="gzip"))
    with pytest.raises(ConfigError, match=r"answered 401: .*corrupt.*check api_key="):
        await client(openai_server, "tokens").generate(ask())


# A chain.


@pytest.mark.parametrize("answer", [completion([7, 5000]), completion([7, True]), completion(None, token_ids=5)])
async def test_chain_ends_with_a_backend_fault_not_an_agent_fault(openai_server: OpenAIServer, answer: object) -> None:
    openai_server.answers("/completions", says(answer))
    agent = HFAgent("bytes", template="chatml", backend=client(openai_server, "tokens", context_length=1000, retries=0))
    (chain,) = await agent.run("Hello?", failures={"retries": 0})
    assert chain.stop is StopReason.BACKEND_FAULT
