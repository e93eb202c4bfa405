"""The client backend against a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents import HFAgent
from agentfly.backends.base import PromptFormat, Request
from agentfly.backends.client import ClientBackend
from agentfly.errors import BackendFault, ConfigError
from agentfly.rollout.events import TokensSampled
from agentfly.types import FinishReason, Image, Message, Sampling, ToolCall
from tests.backends.openai_server import (
    OpenAIServer,
    Reply,
    chat,
    completion,
    event,
    refuses,
    says,
    streams,
    writes,
)

PROMPT = [1, 2, 3]
MODELS = {"data": [{"id": "tiny", "max_model_len": 100}]}


@pytest.fixture
def server(openai_server: OpenAIServer) -> OpenAIServer:
    openai_server.answers("/models", says(MODELS))
    return openai_server


def tokens(server: OpenAIServer, **settings: Any) -> ClientBackend:
    return ClientBackend("tiny", server.url, prompt_format="tokens", **{"backoff": 0.001, **settings})


def messages(server: OpenAIServer, **settings: Any) -> ClientBackend:
    return ClientBackend("tiny", server.url, **{"backoff": 0.001, **settings})


def ask(sampling: Sampling | None = None, **fields: Any) -> Request:
    """A request for either prompt format."""
    request_fields = {"messages": (Message("user", "Hi"),), **fields}
    return Request(prompt=PROMPT, sampling=sampling or Sampling(max_tokens=16), **request_fields)


# Tokens.


async def test_completion_request_and_response_tokens(server: OpenAIServer) -> None:
    server.answers("/completions", says(completion([7, 8, 2], [-0.5, -0.25, -0.125], prompt_token_ids=PROMPT)))
    done = await tokens(server, weight_version=4).generate(ask(stop_ids=frozenset({2, 0}), chain="chain-9"))
    assert list(done.token_ids) == [7, 8, 2]
    assert list(done.logprobs) == [-0.5, -0.25, -0.125]
    assert list(done.weight_versions) == [4, 4, 4]
    assert (done.finish, done.prompt_ids, done.message) == (FinishReason.STOP, None, None)
    assert server.bodies("/completions") == [
        {
            "model": "tiny",
            "prompt": PROMPT,
            "max_tokens": 16,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [0, 2],
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
    ]
    assert server.seen[-1].headers["x-session-id"] == "chain-9"


async def test_every_sampling_field_reaches_the_server(server: OpenAIServer) -> None:
    server.answers("/completions", says(completion()))
    sampling = Sampling(0.0, 0.9, 20, 0.05, 1.1, 5, ("</a>", "END"), 11)
    await tokens(server, extra_body={"priority": 3}).generate(ask(sampling))
    (body,) = server.bodies("/completions")
    assert body.items() >= {
        "temperature": 0.0, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
        "max_tokens": 5, "stop": ["</a>", "END"], "seed": 11, "priority": 3,
    }.items()  # fmt: skip


@pytest.mark.parametrize(
    ("finish_reason", "finish"),
    [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH), ("abort", FinishReason.ABORTED)],
)
async def test_finish_reason_is_parsed(server: OpenAIServer, finish_reason: str, finish: FinishReason) -> None:
    server.answers("/completions", says(completion(finish=finish_reason)))
    assert (await tokens(server).generate(ask())).finish is finish


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (completion(ids=None), "return_token_ids"),
        (completion(logprobs=None), "prompt_format='messages' works without"),
        (completion(logprobs=[-0.5]), "log-probability for each"),
        (completion(logprobs=[-0.5, None]), "log-probability for each"),
        (completion(prompt_token_ids=[0, *PROMPT]), "another prompt, of 4 tokens, than the 3"),
        (completion(ids=[], logprobs=[]), "without one sampled token"),
        (completion(finish="content_filter"), "content filter"),
        (completion(finish="mood"), "finish_reason 'mood'"),
    ],
)
async def test_response_without_exact_tokens_is_a_fault(server: OpenAIServer, answer: object, words: str) -> None:
    server.answers("/completions", says(answer))
    with pytest.raises(BackendFault, match=words):
        await tokens(server).generate(ask())
    assert len(server.bodies("/completions")) == 1


async def test_html_response_is_quoted(server: OpenAIServer) -> None:
    server.answers("/completions", writes("<html>Welcome</html>"))
    with pytest.raises(BackendFault, match="<html>Welcome"):
        await tokens(server).generate(ask())


async def test_max_tokens_is_limited_by_the_context(server: OpenAIServer) -> None:
    server.answers("/completions", says(completion()))
    backend = tokens(server)
    await asyncio.gather(
        backend.generate(ask(Sampling(max_tokens=None))),
        backend.generate(ask(Sampling(max_tokens=500))),
        backend.generate(ask(Sampling(max_tokens=5))),
    )
    assert sorted(body["max_tokens"] for body in server.bodies("/completions")) == [5, 97, 97]
    assert (backend.context_length, len(server.bodies("/models"))) == (100, 1)
    with pytest.raises(BackendFault, match="100 tokens, the server's context 100: no room"):
        await backend.generate(Request(prompt=[1] * 100, sampling=Sampling()))


async def test_unknown_context_length_needs_max_tokens(server: OpenAIServer) -> None:
    server.answers("/models")
    server.answers("/completions", says(completion()))
    backend = tokens(server)
    with pytest.raises(ConfigError, match=r"context_length=.*max_tokens="):
        await backend.generate(ask(Sampling(max_tokens=None)))
    await backend.generate(ask())
    await tokens(server, context_length=10).generate(ask(Sampling(max_tokens=None)))
    assert [body["max_tokens"] for body in server.bodies("/completions")] == [16, 7]


async def test_images_are_rejected_with_tokens(server: OpenAIServer) -> None:
    with pytest.raises(ConfigError, match="prompt_format='messages'"):
        await tokens(server).generate(ask(images=(Image("data:image/png;base64,AA=="),)))


# Streamed tokens.


async def test_streamed_tokens_are_delivered_as_they_arrive(server: OpenAIServer) -> None:
    whole = b"".join(
        [
            b": hello\n\n",
            event(completion([7], [-0.5], None, prompt_token_ids=PROMPT, text="a\u2028b\u0085c")),
            b'data: {"choices":\r\ndata: [{"token_ids": [8, 9], "text": "",\r\n'
            b'data: "logprobs": {"token_logprobs": [-1.5, -2.5]}, "finish_reason": null}]}\r\n\r\n',
            event(completion([], [], "length")),
            event({"choices": [], "usage": {"completion_tokens": 3}}),
            b"data: [DONE]\n\n",
        ]
    )
    server.answers("/completions", streams(*(whole[i : i + 37] for i in range(0, len(whole), 37))))
    heard: list[list[int]] = []
    done = await tokens(server).generate(ask(on_tokens=lambda ids: heard.append(list(ids))))
    assert heard == [[7], [8, 9]]
    assert (list(done.token_ids), list(done.logprobs)) == ([7, 8, 9], [-0.5, -1.5, -2.5])
    assert done.finish is FinishReason.LENGTH
    assert server.bodies("/completions")[0]["stream"] is True


GOOD = (event(completion([7], [-0.5], None)), event(completion([8], [-0.5])), b"data: [DONE]\n\n")
BROKEN = event({"error": {"message": "engine died", "code": 500}})


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(streams(b": started\n\n", cut=True), id="cut"),
        pytest.param(streams(BROKEN, b"data: [DONE]\n\n"), id="error"),
        pytest.param(streams(b"data: [DONE]\n\n"), id="empty"),
        pytest.param(streams(b"data: {oops\n\n"), id="no JSON"),
    ],
)
async def test_stream_that_delivered_nothing_is_retried(server: OpenAIServer, first: Reply) -> None:
    server.answers("/completions", first, streams(*GOOD))
    heard: list[int] = []
    done = await tokens(server).generate(ask(on_tokens=heard.extend))
    assert heard == list(done.token_ids) == [7, 8]
    assert len(server.bodies("/completions")) == 2


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        pytest.param(streams(GOOD[0], cut=True), "broke off after 1 tokens", id="cut"),
        pytest.param(streams(GOOD[0], GOOD[1][:20], cut=True), "broke off after 1 tokens", id="cut in an event"),
        pytest.param(streams(GOOD[0], BROKEN), "after 1 tokens.*engine died", id="error"),
        pytest.param(streams(GOOD[0], b"data: [DONE]\n\n"), "no finish_reason came", id="ended early"),
        pytest.param(streams(event(completion(None, None, None))), "return_token_ids", id="no ids"),
        pytest.param(streams(GOOD[0], b"data: {oops\n\n"), "after 1 tokens.*not JSON.*oops", id="no JSON"),
    ],
)
async def test_stream_that_delivered_tokens_is_not_retried(server: OpenAIServer, reply: Reply, words: str) -> None:
    server.answers("/completions", reply, streams(*GOOD))
    with pytest.raises(BackendFault, match=words):
        await tokens(server).generate(ask(on_tokens=lambda ids: None))
    assert len(server.bodies("/completions")) == 1


async def test_stream_cut_after_its_finish_reason_is_complete(server: OpenAIServer) -> None:
    server.answers("/completions", streams(*GOOD[:2], cut=True))
    assert list((await tokens(server).generate(ask(on_tokens=lambda ids: None))).token_ids) == [7, 8]


async def test_response_of_a_server_that_does_not_stream(server: OpenAIServer) -> None:
    server.answers("/completions", says(completion()))
    heard: list[int] = []
    await tokens(server).generate(ask(on_tokens=heard.extend))
    assert heard == [7, 8]


# Messages.


async def test_chat_response_with_token_ids(server: OpenAIServer) -> None:
    answer = chat({"content": "Hello"}, ids=[7, 8], logprobs=[-0.5, -0.25], prompt=[1, 5])
    server.answers("/chat/completions", says(answer))
    heard: list[int] = []
    done = await messages(server).generate(ask(on_tokens=heard.extend))
    assert (list(done.token_ids), list(done.logprobs)) == ([7, 8], [-0.5, -0.25])
    assert (list(done.prompt_ids or ()), list(done.weight_versions)) == ([1, 5], [0, 0])
    assert done.message == Message("assistant", "Hello")
    assert heard == [7, 8]
    assert server.bodies("/chat/completions") == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 16,
            "return_token_ids": True,
            "logprobs": True,
        }
    ]


@pytest.mark.parametrize(
    "answer",
    [
        chat({"content": "Hello"}),
        chat({"content": "Hello"}, logprobs=[-0.5, -0.25]),
        chat({"content": "Hello"}, ids=[7, 8], logprobs=[-0.5, -0.25]),
        chat({"content": "Hello"}, ids=[7, 8], logprobs=[-0.5], prompt=[1]),
        chat({"content": "Hello"}, ids=[7, 8], prompt=[1]),
    ],
)
async def test_chat_response_without_all_ids_is_a_message_only(server: OpenAIServer, answer: object) -> None:
    server.answers("/chat/completions", says(answer))
    done = await messages(server).generate(ask())
    assert (list(done.token_ids), list(done.logprobs), done.prompt_ids) == ([], [], None)
    assert done.message == Message("assistant", "Hello")


async def test_native_tool_calls_and_thinking_are_parsed(server: OpenAIServer) -> None:
    good = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    bad = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1'}}
    message = {"content": None, "tool_calls": [good, bad], "reasoning_content": "Sum them."}
    server.answers("/chat/completions", says(chat(message, "tool_calls")))
    done = await messages(server).generate(ask())
    assert done.message is not None
    first, second = done.message.tool_calls
    assert (first.name, dict(first.arguments), first.id, first.problem) == ("add", {"a": 1, "b": 2}, "c1", "")
    assert second.raw == '{"a": 1'
    assert "not JSON" in second.problem
    assert (done.message.thinking, done.message.content, done.finish) == ("Sum them.", "", FinishReason.STOP)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_both_names_of_thinking_are_parsed(server: OpenAIServer, name: str) -> None:
    server.answers("/chat/completions", says(chat({"content": "4", name: "2+2"})))
    done = await messages(server).generate(ask())
    assert done.message == Message("assistant", "4", thinking="2+2")


HISTORY = (
    Message("user", ("Look: ", Image("data:image/png;base64,AA=="))),
    Message("assistant", "", (ToolCall("add", {"a": "é"}, "c1"), ToolCall("", id="c2", raw="{")), "Hm."),
    Message("tool", "3", name="add", tool_call_id="c1"),
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def test_messages_are_sent_in_the_format_of_the_api(server: OpenAIServer) -> None:
    server.answers("/chat/completions", says(chat({"content": "ok"})))
    await messages(server).generate(ask(Sampling(stop=("END",), max_tokens=None), messages=HISTORY, tools=(TOOL,)))
    (body,) = server.bodies("/chat/completions")
    user, assistant, tool = body["messages"]
    assert user["content"] == [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    ]
    first, second = assistant["tool_calls"]
    assert first == {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    assert json.loads(second["function"]["arguments"]) == {}
    assert assistant["reasoning"] == assistant["reasoning_content"] == "Hm."
    assert tool == {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"}
    assert body["tools"] == [TOOL]
    assert body["include_stop_str_in_output"] is True
    assert "max_tokens" not in body


async def test_server_that_rejects_unknown_fields_gets_only_openai_fields(
    server: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers(
        "/chat/completions",
        refuses("Unrecognized request argument supplied: return_token_ids"),
        says(chat({"content": "Hello"})),
    )
    backend = messages(server)
    sampling = Sampling(temperature=0.5, top_k=4, max_tokens=16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            done = await backend.generate(ask(sampling, messages=HISTORY))
    assert done.message == Message("assistant", "Hello")
    assert [record.getMessage() for record in caplog.records if "cannot train" in record.getMessage()] != []
    refused, *plain = server.bodies("/chat/completions")
    assert refused["return_token_ids"] is True
    assert len(plain) == 2
    for body in plain:
        assert set(body) == {"model", "messages", "temperature", "top_k", "max_completion_tokens"}
        assert "reasoning" not in body["messages"][1]
        assert "name" not in body["messages"][2]


async def test_server_that_only_knows_max_tokens(server: OpenAIServer) -> None:
    server.answers(
        "/chat/completions",
        refuses("extra fields not permitted", 422),
        refuses("max_completion_tokens: extra fields not permitted", 422),
        says(chat({"content": "Hello"})),
    )
    backend = messages(server)
    await backend.generate(ask())
    await backend.generate(ask())
    assert [("max_tokens" in body) for body in server.bodies("/chat/completions")] == [
        True,
        False,
        True,
        True,
    ]


async def test_rejection_in_every_dialect_is_raised_and_not_remembered(
    server: OpenAIServer,
) -> None:
    server.answers("/chat/completions", refuses('"auto" tool choice requires --enable-auto-tool-choice'))
    backend = messages(server)
    with pytest.raises(BackendFault, match="--enable-auto-tool-choice"):
        await backend.generate(ask())
    server.answers("/chat/completions", says(chat({"content": "Hello"})))
    await backend.generate(ask())
    assert server.bodies("/chat/completions")[-1]["return_token_ids"] is True


async def test_exact_false_requests_no_token_ids(server: OpenAIServer) -> None:
    server.answers("/chat/completions", says(chat({"content": "Hello"})))
    await messages(server, exact=False).generate(ask())
    assert not {"return_token_ids", "logprobs"} & set(server.bodies("/chat/completions")[0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (chat({"content": "…"}, "content_filter"), "content filter"),
        ({"choices": [{"finish_reason": "stop"}]}, "holds no message"),
        ({"error": {"message": "no such luck"}}, "no such luck"),
    ],
)
async def test_response_without_a_reply_is_a_fault(server: OpenAIServer, answer: object, words: str) -> None:
    server.answers("/chat/completions", says(answer))
    with pytest.raises(BackendFault, match=words):
        await messages(server).generate(ask())


# Errors.


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(refuses("overloaded", 500), id="500"),
        pytest.param(refuses("starting", 503), id="503"),
        pytest.param(refuses("slow down", 429, {"retry-after": "0"}), id="429"),
        pytest.param(refuses("slow down", 429, {"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}), id="date"),
        pytest.param(says({"error": {"message": "busy", "code": 503}}), id="200 with an error"),
    ],
)
async def test_retryable_errors_are_retried(server: OpenAIServer, trouble: Reply) -> None:
    server.answers("/chat/completions", trouble, trouble, says(chat({"content": "Hello"})))
    done = await messages(server).generate(ask())
    assert done.message == Message("assistant", "Hello")
    assert len(server.bodies("/chat/completions")) == 3


@pytest.mark.timeout(30)
async def test_retry_after_takes_precedence_over_backoff(server: OpenAIServer) -> None:
    trouble = refuses("slow down", 429, {"retry-after": "0"})
    server.answers("/chat/completions", trouble, says(chat({"content": "Hello"})))
    assert (await messages(server, backoff=60.0).generate(ask())).message is not None


async def test_long_retry_after_fails_at_once(server: OpenAIServer) -> None:
    server.answers("/chat/completions", refuses("quota used up", 429, {"retry-after": "86400"}))
    with pytest.raises(BackendFault, match="quota used up"):
        await messages(server).generate(ask())
    assert len(server.bodies("/chat/completions")) == 1


async def test_last_error_is_raised_after_all_retries(server: OpenAIServer) -> None:
    server.answers("/chat/completions", refuses("engine is dead", 500))
    with pytest.raises(BackendFault, match=r"answered 500: engine is dead \(asked 3 times\)"):
        await messages(server, retries=2).generate(ask())
    assert len(server.bodies("/chat/completions")) == 3


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, ConfigError, "check api_key="),
        (403, ConfigError, "check api_key="),
        (404, ConfigError, "check model='tiny'"),
        (307, ConfigError, "check model='tiny'"),
        (400, BackendFault, "answered 400: it will not do"),
        (413, BackendFault, "answered 413: it will not do"),
    ],
)
async def test_error_status_raises_the_right_exception(
    server: OpenAIServer, status: int, kind: type[Exception], words: str
) -> None:
    server.answers("/completions", refuses("it will not do", status))
    with pytest.raises(kind, match=re.escape(words)):
        await tokens(server).generate(ask())
    assert len(server.bodies("/completions")) == 1


@pytest.mark.parametrize("make", [tokens, messages])
async def test_prompt_that_exceeds_the_context_raises(server: OpenAIServer, make: Any) -> None:
    for path in ("/completions", "/chat/completions"):
        server.answers(path, refuses("This model's maximum context length is 4096 tokens. However, …"))
    with pytest.raises(BackendFault, match=r"maximum context length is 4096 tokens.*allow fewer turns"):
        await make(server).generate(ask())
    assert len([seen for seen in server.seen if seen.path != "/models"]) == 1


async def test_unreachable_server_is_retried_only_if_it_was_reachable_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        backend = ClientBackend("tiny", url, retries=1, backoff=0.001)
        with pytest.raises(BackendFault, match=rf"cannot reach {url}: .*agentfly serve tiny.*with /v1$") as raised:
            await backend.generate(ask())  # never reachable: raised at once
        assert "httpx" not in "".join(traceback.format_exception(raised.value))
        backend._connected = True  # reachable before: it may come back
        with pytest.raises(BackendFault, match=rf"cannot reach {url}: .*asked 2 times"):
            await backend.generate(ask())


async def test_server_that_never_answers_times_out(server: OpenAIServer) -> None:
    server.answers("/chat/completions", server.waits_forever())
    with pytest.raises(BackendFault, match=r"no answer from .* in 1 s; timeout="):
        await messages(server, timeout=1.0).generate(ask())
    assert await asyncio.to_thread(server.disconnected.wait, 60)
    assert len(server.bodies("/chat/completions")) == 1


async def test_cancellation_closes_the_connection(server: OpenAIServer) -> None:
    server.answers("/chat/completions", server.waits_forever())
    backend = messages(server)
    task = asyncio.create_task(backend.generate(ask()))
    assert await asyncio.to_thread(server.arrived.wait, 60)
    assert not server.disconnected.is_set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(server.disconnected.wait, 60)


async def test_requests_per_minute_is_enforced(server: OpenAIServer) -> None:
    server.answers("/chat/completions", says(chat({"content": "Hello"})))
    backend = messages(server, requests_per_minute=5)
    requests = [asyncio.create_task(backend.generate(ask())) for _ in range(20)]
    while sum(request.done() for request in requests) < 5:
        await asyncio.sleep(0.01)
    await asyncio.wait(requests, timeout=0.5)  # a sixth request would be sent at once
    assert sum(request.done() for request in requests) == len(server.seen) == 5
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


# Creation and closing.


def test_backend_works_in_two_event_loops(server: OpenAIServer) -> None:
    server.answers("/chat/completions", says(chat({"content": "Hello"})))
    backend = messages(server)

    async def twice() -> list[str]:
        done = await asyncio.gather(backend.generate(ask()), backend.generate(ask()))
        return [one.message.text for one in done if one.message]

    assert [asyncio.run(twice()), asyncio.run(twice())] == [["Hello"] * 2] * 2


async def test_close_may_be_called_twice_and_before_the_first_request(server: OpenAIServer) -> None:
    server.answers("/chat/completions", says(chat({"content": "Hello"})))
    backend = messages(server)
    await backend.close()
    await backend.generate(ask())
    await backend.close()
    await backend.close()
    assert await asyncio.to_thread(server.left_alone)


async def test_close_closes_connections_of_another_thread(server: OpenAIServer) -> None:
    server.answers("/chat/completions", says(chat({"content": "Hello"})))
    backend = messages(server)
    requested, closed = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        await backend.generate(ask())
        requested.set()
        assert await asyncio.to_thread(closed.wait, 60)

    thread = asyncio.create_task(asyncio.to_thread(asyncio.run, elsewhere()))
    assert await asyncio.to_thread(requested.wait, 60)
    await backend.close()
    assert await asyncio.to_thread(server.left_alone)
    closed.set()
    await thread


@pytest.mark.parametrize(
    ("configured", "environment", "sent"),
    [("mine", "theirs", "Bearer mine"), (None, "theirs", "Bearer theirs"), (None, None, None)],
)
async def test_api_key_is_sent(
    server: OpenAIServer,
    monkeypatch: pytest.MonkeyPatch,
    configured: str | None,
    environment: str | None,
    sent: str | None,
) -> None:
    if environment:
        monkeypatch.setenv("OPENAI_API_KEY", environment)
    server.answers("/chat/completions", says(chat({"content": "Hello"})))
    await messages(server, api_key=configured).generate(ask())
    assert server.seen[0].headers.get("authorization") == sent


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base_url": "localhost:8000"}, "must start with http://"),
        ({"prompt_format": "latin"}, "prompt_format='latin'; it may be 'tokens' or 'messages'"),
        ({"extra_body": {"n": 2, "stream": True}}, "extra_body may not set n, stream"),
        ({"max_response_bytes": 0}, "max_response_bytes must be a whole number of at least 1, not 0"),
        ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, or None, not 0"),
        ({"requests_per_minute": 0}, "requests_per_minute must be a whole number of at least 1, or None, not 0"),
        ({"retries": -1}, "retries must be a whole number of at least 0, not -1"),
        ({"max_connections": True}, "max_connections must be a whole number, not True"),
        ({"timeout": 0}, "timeout must be a number above 0, not 0"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        ClientBackend("tiny", **settings)


def test_unknown_setting_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_requests_per_minute"):
        ClientBackend("tiny", max_requests_per_minute=3)  # type: ignore[call-arg]


async def test_properties_and_weight_version() -> None:
    backend = ClientBackend("tiny", prompt_format=PromptFormat.TOKENS, context_length=12)
    assert (backend.prompt_format, backend.context_length, backend.weight_version) == (PromptFormat.TOKENS, 12, 0)
    backend.weight_version = 5
    assert backend.weight_version == 5
    await backend.update_weights([], 6)
    assert backend.weight_version == 6


async def test_an_update_that_the_server_refuses_is_a_fault_until_the_next(
    server: OpenAIServer, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="weights are tensors: pip install 'agentfly-rl[train]'")
    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    weights = {"weight": torch.zeros(2)}
    save_file(weights, model / "model.safetensors")
    for path in ("/vllm/pause", "/vllm/resume"):
        server.answers(path, says({}))
    server.answers("/vllm/collective_rpc", refuses("out of memory", 500), says({}))
    backend = ClientBackend(str(model), f"{server.url}/vllm/v1", weights_dir=str(tmp_path))
    with pytest.raises(BackendFault, match="out of memory"):
        await backend.update_weights(weights.items(), 1)
    with pytest.raises(BackendFault, match="did not take the weights of version 1"):
        await backend.generate(ask())
    await backend.update_weights(weights.items(), 2)
    assert backend.weight_version == 2
    await backend.close()


# Streamed text.


def words(finish: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"delta": delta, "finish_reason": finish}]})


async def test_chat_is_streamed_if_no_ids_are_requested(server: OpenAIServer) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a": '}}
    arguments_delta = {"index": 0, "function": {"arguments": "1}"}}
    other = {"index": 1, "id": "c2", "function": {"name": "stop", "arguments": ""}}
    server.answers(
        "/chat/completions",
        streams(
            words(role="assistant", reasoning_content="Hm."),
            words(content="Let "),
            words(content="me."),
            words(tool_calls=[call]),
            words(tool_calls=[arguments_delta, other]),
            words("tool_calls"),
            event({"choices": [], "usage": {}}),
            b"data: [DONE]\n\n",
        ),
    )
    heard: list[str] = []
    done = await messages(server, exact=False).generate(ask(on_text=heard.append))
    assert heard == ["Let ", "Let me."]
    assert done.message is not None
    assert (done.message.text, done.message.thinking, done.finish) == ("Let me.", "Hm.", FinishReason.STOP)
    assert [(c.name, c.arguments, c.id) for c in done.message.tool_calls] == [
        ("add", {"a": 1}, "c1"),
        ("stop", {}, "c2"),
    ]
    assert server.bodies("/chat/completions")[0]["stream"] is True


async def test_observer_does_not_change_the_request(server: OpenAIServer) -> None:
    """The first request asks for ids; if the server returns none, later ones are streamed."""
    answer = chat({"content": "Hello"})
    server.answers("/chat/completions", says(answer), streams(words(content="Bye"), words("stop")))
    backend, heard = messages(server), []
    for _ in range(2):
        await backend.generate(ask(on_text=heard.append))
    first, second = server.bodies("/chat/completions")
    assert heard == ["Hello", "Bye"]
    assert first["return_token_ids"] is True
    assert "stream" not in first
    assert second["stream"] is True


@pytest.mark.parametrize("cut", [streams(words(content="Let "), cut=True), streams(words(content="Let "), BROKEN)])
async def test_chat_stream_that_delivered_text_is_not_retried(server: OpenAIServer, cut: Reply) -> None:
    server.answers("/chat/completions", cut, streams(words(content="x"), words("stop")))
    with pytest.raises(BackendFault, match="broke off after 1 deltas"):
        await messages(server, exact=False).generate(ask(on_text=lambda text: None))
    assert len(server.bodies("/chat/completions")) == 1


async def test_chat_stream_that_delivered_nothing_is_retried(server: OpenAIServer) -> None:
    server.answers("/chat/completions", streams(b": hi\n\n", cut=True), streams(words(content="x"), words("stop")))
    done = await messages(server, exact=False).generate(ask(on_text=lambda text: None))
    assert done.message == Message("assistant", "x")


async def test_agent_streams_the_text_of_a_chat_server(server: OpenAIServer) -> None:
    server.answers("/chat/completions", streams(words(content="It is "), words(content="42."), words("stop")))
    agent = HFAgent("tiny", backend=messages(server, exact=False))
    seen = [event.text async for event in agent.stream("What is 6 times 7?") if isinstance(event, TokensSampled)]
    assert seen == ["It is ", "It is 42."]
    assert agent.trajectories[0].prediction == "It is 42."
    assert "no token ids" in str(agent.trajectories[0].untrainable)
