"""Recording, limits, cancellation and isolation, over plain HTTP."""

import asyncio
import json
import time
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest

from agentfly.agents import HFAgent
from agentfly.backends.base import Backend, Request
from agentfly.backends.client import ClientBackend
from agentfly.backends.scripted import ScriptedBackend
from agentfly.errors import BackendFault, ConfigError
from agentfly.gateway import Gateway, chat_completions
from agentfly.gateway.chat import ApiError, parse_body
from agentfly.gateway.session import GatewaySession
from agentfly.gateway.streaming import ReplyStream
from agentfly.rollout import ChainLimits, ChainSettings
from agentfly.segment import Author
from agentfly.trajectory import FailureKind, StopReason
from agentfly.types import Completion, Sampling
from tests.fakes import call
from tests.gateway.conversations import PARAMETERS, SETTINGS, serve

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


async def ask(gateway: Gateway, key: str, messages: list[Any], **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.base_url, headers={"authorization": f"Bearer {key}"}) as client:
        return await client.post("/chat/completions", json={"messages": messages, **fields}, timeout=60)


async def test_changed_history_begins_a_new_segment() -> None:
    async with serve(lambda turn: f"<think>thought {turn.turn}</think>reply {turn.turn}") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        first = (await ask(gateway, key, [USER])).json()["choices"][0]["message"]
        assert (first["reasoning_content"], first["content"]) == ("thought 0", "reply 0")
        recorder = session.recorder
        assert recorder is not None
        await ask(gateway, key, [USER, first, USER])
        assert (len(recorder.segments), recorder.continued) == (1, 1)
        bare = {name: value for name, value in first.items() if name != "reasoning_content"}
        for number, messages in enumerate(
            [
                [USER, bare, USER],  # dropped thinking
                [{"role": "system", "content": "new"}, USER, first, USER],  # edited prompt
                [USER, {**first, "content": "reply zero"}, USER],  # edited reply
                [{"role": "user", "content": "So far: reply 0"}, {**first, "content": "reply 1"}, USER],  # compaction
            ]
        ):
            await ask(gateway, key, messages)
            assert len(recorder.segments) == number + 2
        spans = [segment.spans[0].author for segment in recorder.segments]
        assert spans == [Author.TASK] + [Author.HISTORY] * 4
        assert gateway.metrics()["continued"] == pytest.approx(1 / 5)


async def test_two_continuations_of_one_turn_keep_its_tokens() -> None:
    async with serve(lambda turn: f"reply {turn.turn}") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        first = (await ask(gateway, key, [USER])).json()["choices"][0]["message"]
        for text in ("a", "b"):
            assert (await ask(gateway, key, [USER, first, {"role": "user", "content": text}])).is_success
        recorder = session.recorder
        assert recorder is not None
        one, other = recorder.segments
        ends = [node.turns[0][1] for node, sent, _ in recorder.responses.values() if sent.text == "reply 0"]
        end = ends[0]
        assert one.tokens[:end].tolist() == other.tokens[:end].tolist()
        assert other.num_sampled_tokens == len("reply 2") + 1  # the first turn is trained once
        assert not other.mask[:end].any()


async def test_sub_agents_of_a_chain_have_segments_of_their_own() -> None:
    async with serve(lambda turn: f"reply {turn.turn}") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        histories: list[list[Any]] = [[{"role": "system", "content": name}, USER] for name in ("planner", "worker")]
        for _ in range(3):
            replies = await asyncio.gather(*(ask(gateway, key, history) for history in histories))
            for history, reply in zip(histories, replies, strict=True):
                history += [reply.json()["choices"][0]["message"], USER]
        recorder = session.recorder
        assert recorder is not None
        assert (len(recorder.turns), len(recorder.segments), recorder.continued) == (6, 2, 4)
        assert [segment.spans[0].author for segment in recorder.segments] == [Author.TASK] * 2
        assert sorted(turn for segment in recorder.segments for turn in {s.turn for s in segment.spans}) == [*range(6)]


async def test_parallel_sub_agents_that_are_answered_alike_continue_their_own_tokens() -> None:
    async with serve(["same", "same", "a", "b"]) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        replies = await asyncio.gather(*(ask(gateway, key, [USER]) for _ in range(2)))
        first = replies[0].json()["choices"][0]["message"]
        for text in ("one", "two"):
            await ask(gateway, key, [USER, first, {"role": "user", "content": text}])
        recorder = session.recorder
        assert recorder is not None
        assert (len(recorder.segments), recorder.continued, recorder.follow_ups) == (2, 2, 2)


async def test_a_response_is_continued_by_its_id_also_if_another_has_the_same_text() -> None:
    script = lambda turn: call("add", a=1, b=2) if turn.turn < 2 else "3"  # noqa: E731
    async with serve(script) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        headers = {"authorization": f"Bearer {key}"}
        tools = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60) as client:

            async def respond(**fields: Any) -> httpx.Response:
                return await client.post("/responses", json={"tools": tools, **fields})

            answers = [(await respond(input="Add 1 and 2.")).json() for _ in range(2)]
            ids = [answer["output"][0]["call_id"] for answer in answers]
            for answer, call_id in zip(answers, ids, strict=True):
                result = {"type": "function_call_output", "call_id": call_id, "output": "3"}
                done = await respond(input=[result], previous_response_id=answer["id"])
                assert done.json()["output"][0]["content"][0]["text"] == "3"
            foreign = {"type": "function_call_output", "call_id": ids[1], "output": "3"}
            rejected = await respond(input=[foreign], previous_response_id=answers[0]["id"])
            assert (rejected.status_code, ids[1] in rejected.text) == (400, True)
        assert session.recorder is not None
        assert [len(session.recorder.segments), session.recorder.continued] == [2, 2]
        results = [span.messages[0] for segment in session.recorder.segments for span in segment.spans if span.turn > 1]
        assert [message.name for message in results if message.role == "tool"] == ["add", "add"]


def write_json(value: Any, random: Random) -> str:
    """JSON text of a value with random spacing, and with a field of an object written twice now and then."""
    space = random.choice(["", " ", "\n  "])
    if isinstance(value, dict):
        fields = [(name, content) for name, content in value.items()]
        if fields and random.random() < 0.1:
            name, content = random.choice(fields)
            fields.insert(0, (name, random.choice([content, None, "x", [], 0])))
        texts = [f"{json.dumps(name)}:{space}{write_json(content, random)}" for name, content in fields]
        return "{" + f",{space}".join(texts) + "}"
    if isinstance(value, list):
        return "[" + f"{space},".join(write_json(item, random) for item in value) + "]"
    return json.dumps(value, ensure_ascii=random.random() < 0.5)


async def test_fuzzed_requests_are_read_as_by_a_plain_parser() -> None:
    """Continued, repeated and edited conversations, with duplicate keys: a session that has seen other requests builds
    the same prompt as one that has seen none."""
    random = Random(1)
    texts = ["Hi", "", "Ü {", '"messages":[', "]}", "\\u0041", "0"]
    values = [1, True, 1.0, "1", None, [1], {"b": 1}, {"b": True}]
    async with serve(lambda turn: f"reply {turn.turn}") as gateway:
        _, session = await gateway.open_session(replace(SETTINGS, limits=ChainLimits(max_turns=1000)))
        fresh = GatewaySession(session.backend, session.templates, session.settings, record=False)
        conversations: list[list[dict[str, Any]]] = [[{"role": "user", "content": "Hi"}]]
        for number in range(400):
            messages = list(random.choice(conversations))
            if random.random() < 0.3:
                messages[random.randrange(len(messages))] = {"role": "user", "content": random.choice(texts)}
            if random.random() < 0.5:
                function = {"name": "add", "arguments": json.dumps({"a": random.choice(values)})}
                call_id = f"call {number}"
                calls = [{"id": call_id, "function": function}]
                messages.append({"role": "assistant", "content": "", "tool_calls": calls})
                messages.append({"role": "tool", "tool_call_id": call_id, "content": random.choice(texts)})
            else:
                messages.append({"role": "user", "content": random.choice(texts)})
            body = {"x": {"messages": []}, "messages": messages, "max_tokens": 5}
            data = write_json(body, random).encode()
            assert parse_body(data) == json.loads(data)
            try:
                request = chat_completions.parse_request(json.loads(data))
            except ApiError:
                with pytest.raises(ApiError):
                    chat_completions.parse_request(parse_body(data))
                continue
            expected = await fresh.complete(request)
            reply = await session.complete(chat_completions.parse_request(parse_body(data)))
            assert list(reply.prompt) == list(expected.prompt), data
            if random.random() < 0.5:
                conversations.append([*messages, {"role": "assistant", "content": reply.message.text}])
        assert session.recorder is not None
        assert session.recorder.continued > 20


async def test_an_edited_argument_of_another_type_is_another_history() -> None:
    async with serve(lambda turn: call("add", a=1, b=True) if turn.turn == 0 else "done") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        first = (await ask(gateway, key, [USER], tools=[TOOL])).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "2"}
        await ask(gateway, key, [USER, first, result, USER], tools=[TOOL])
        edited = json.loads(json.dumps(first))
        edited["tool_calls"][0]["function"]["arguments"] = '{"a": true, "b": 1}'
        done = {"role": "assistant", "content": "done"}
        await ask(gateway, key, [USER, edited, result, USER, done, USER], tools=[TOOL])
        assert session.recorder is not None
        assert len(session.recorder.segments) == 2


async def test_results_are_shown_in_the_order_of_their_calls() -> None:
    """Also if the ids are exchanged later: that is another history."""
    calls = f"{call('add', a=1, b=1)}\n{call('add', a=2, b=2)}"
    async with serve(lambda turn: calls if turn.turn == 0 else "done") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        first = (await ask(gateway, key, [USER], tools=[TOOL])).json()["choices"][0]["message"]
        ids = [tool_call["id"] for tool_call in first["tool_calls"]]

        def answer(*contents: tuple[str, str]) -> list[dict[str, str]]:
            return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in contents]

        await ask(gateway, key, [USER, first, *answer((ids[1], "four"), (ids[0], "two"))], tools=[TOOL])
        recorder = session.recorder
        assert recorder is not None
        assert [len(recorder.segments), recorder.continued] == [1, 1]
        prompt_text = session.templates.base.codec.decode(recorder.segments[0].tokens.tolist())
        assert prompt_text.index("two") < prompt_text.index("four")
        done = {"role": "assistant", "content": "done"}
        exchanged = answer((ids[0], "four"), (ids[1], "two"))
        await ask(gateway, key, [USER, first, *exchanged, done, USER], tools=[TOOL])
        assert len(recorder.segments) == 2


@pytest.mark.parametrize("roles", [("user",), ("user", "assistant")])
async def test_a_long_conversation_does_not_block_other_clients(roles: tuple[str, ...]) -> None:
    messages = [{"role": roles[number % len(roles)], "content": f"message {number}"} for number in range(20_001)]
    async with serve("done") as gateway, httpx.AsyncClient() as client:
        key, _ = await gateway.open_session(SETTINGS)
        asking = asyncio.create_task(ask(gateway, key, messages))
        longest = 0.0
        while not asking.done():
            started = time.perf_counter()
            await client.get(f"{gateway.url}/health", timeout=60)
            longest = max(longest, time.perf_counter() - started)
            await asyncio.sleep(0.01)
        assert (await asking).is_success
    assert longest < 2.0


async def test_chains_without_a_rollout_have_a_time_limit() -> None:
    async with serve(Waiting(), api_key="k", limits=ChainLimits(chain_seconds=0.3)) as gateway:
        answer = await ask(gateway, "k", [USER])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "chain_seconds")
        assert (await ask(gateway, "k", [USER])).json()["error"]["code"] == "chain_seconds"
        chain = gateway.sessions[""].to_trajectory()
        assert (chain.stop, chain.failures[0].kind) == (StopReason.TIMEOUT, FailureKind.TIMEOUT)


async def test_limits_of_the_chain_are_enforced() -> None:
    limits = ChainLimits(max_turns=2, max_chain_tokens=20, context_length=60)
    async with serve(["0123456789"] * 4) as gateway:
        key, session = await gateway.open_session(ChainSettings(limits=limits))
        long = await ask(gateway, key, [{"role": "user", "content": "x" * 80}])
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert session.stop is StopReason.CONTEXT_LIMIT
        assert (await ask(gateway, key, [USER])).json()["choices"][0]["finish_reason"] == "stop"
        assert session.stop is None
        assert (await ask(gateway, key, [USER])).json()["choices"][0]["finish_reason"] == "length"
        assert session.stop is StopReason.MAX_TOKENS
        assert (await ask(gateway, key, [USER])).json()["error"]["code"] == "max_turns"


async def ask_together(gateway: Gateway, key: str, count: int, **fields: Any) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=count)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60, limits=limits) as client:
        body = {"messages": [USER], **fields}
        return await asyncio.gather(*(client.post("/chat/completions", json=body) for _ in range(count)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("limits", "turns", "tokens", "code"),
    [
        (ChainLimits(max_turns=3), 3, 33, "max_turns"),
        (ChainLimits(max_turns=30, max_chain_tokens=40), 4, 40, "max_chain_tokens"),
    ],
)
async def test_limits_hold_for_parallel_requests(
    limits: ChainLimits, turns: int, tokens: int, code: str, stream: bool
) -> None:
    # With a latency, requests are admitted while others run: without one, each ends before the next is admitted.
    async with serve(ScriptedBackend("0123456789", latency=0.01)) as gateway:
        key, session = await gateway.open_session(ChainSettings(limits=limits))
        answers = await ask_together(gateway, key, 50, stream=stream)
        assert sum(code in answer.text for answer in answers) == 50 - turns
        assert session.recorder is not None
        assert len(session.recorder.turns) == turns
        assert sum(segment.num_sampled_tokens for segment in session.recorder.segments) == tokens


async def test_parallel_requests_have_seeds_of_their_own() -> None:
    seeds: list[int | None] = []

    class Together(ScriptedBackend):
        """Answers when all requests are there."""

        async def generate(self, request: Request) -> Completion:
            seeds.append(request.sampling.seed)
            while len(seeds) < 8:
                await asyncio.sleep(0)
            return await super().generate(request)

    async with serve(Together(lambda turn: f"reply {turn.turn}")) as gateway:
        key, _ = await gateway.open_session(ChainSettings(limits=ChainLimits(max_turns=50), seed=1))
        answers = await ask_together(gateway, key, 8)
        replies = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
        assert replies == {f"reply {number}" for number in range(8)}
    assert len(set(seeds)) == 8


async def test_a_failed_request_gives_back_its_turn() -> None:
    failed: list[Request] = []

    class FailingOnce(ScriptedBackend):
        async def generate(self, request: Request) -> Completion:
            if not failed:
                failed.append(request)
                raise BackendFault("no connection")
            assert (request.turn, request.sampling) == (failed[0].turn, failed[0].sampling)
            return await super().generate(request)

    async with serve(FailingOnce("hello")) as gateway:
        limits = ChainLimits(max_turns=1, max_chain_tokens=40)
        key, _ = await gateway.open_session(ChainSettings(limits=limits, seed=1))
        # The second waits for the first, which may use up both limits.
        statuses = sorted(answer.status_code for answer in await ask_together(gateway, key, 2))
        assert statuses == [200, 502]
        assert (await ask(gateway, key, [USER])).json()["error"]["code"] == "max_turns"


class RecordingBackend(ScriptedBackend):
    """Keeps the requests that it answers."""

    def __init__(self) -> None:
        super().__init__("hello")
        self.requests: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        return await super().generate(request)


@pytest.mark.parametrize(
    ("api", "field"),
    [
        ("chat/completions", "max_tokens"),
        ("chat/completions", "max_completion_tokens"),
        ("responses", "max_output_tokens"),
        ("messages", "max_tokens"),
    ],
)
async def test_a_request_chooses_its_max_tokens_unless_the_run_sets_a_lower_one(api: str, field: str) -> None:
    backend = RecordingBackend()
    body = {"input" if api == "responses" else "messages": [USER]}
    async with serve(backend) as gateway:
        for sampling in (
            Sampling(),
            replace(Sampling(), temperature=0.5),
            Sampling(max_tokens=1024),
            Sampling(max_tokens=None),
        ):
            key, _ = await gateway.open_session(ChainSettings(sampling=sampling))
            async with httpx.AsyncClient(base_url=gateway.base_url, headers={"x-api-key": key}) as client:
                for fields in ({field: 4096}, {field: 7}, {}):
                    (await client.post(f"/{api}", json={**body, **fields})).raise_for_status()
    limits = [request.sampling.max_tokens for request in backend.requests]
    assert limits == [4096, 7, 1024, 4096, 7, 1024, 1024, 7, 1024, 4096, 7, None]


async def test_a_stream_that_is_refused_after_waiting_has_a_status() -> None:
    async with serve() as gateway:
        key, _ = await gateway.open_session(ChainSettings(limits=ChainLimits(max_turns=1), seed=1))
        answers = await asyncio.gather(*(ask(gateway, key, [USER], stream=True) for _ in range(2)))
        assert sorted(answer.status_code for answer in answers) == [200, 400]


async def test_the_run_decides_the_sampling_and_a_request_may_only_lower_its_length() -> None:
    backend = RecordingBackend()
    async with serve(backend) as gateway:
        key, _ = await gateway.open_session(SETTINGS)
        await ask(gateway, key, [USER], temperature=0.0, max_tokens=1000, stop="x")
        await ask(gateway, key, [USER], max_completion_tokens=7)
        first, second = (request.sampling for request in backend.requests)
        assert (first.temperature, first.max_tokens, first.stop) == (1.0, 200, ("x",))
        assert second.max_tokens == 7


async def test_a_fault_of_the_backend_is_recorded() -> None:
    def fail(turn: Any) -> str:
        raise BackendFault("out of memory")

    async with serve(fail) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        answer = await ask(gateway, key, [USER])
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "backend_fault")
        assert session.stop is StopReason.BACKEND_FAULT
        assert [failure.kind for failure in session.failures] == [FailureKind.BACKEND]
        streamed = await ask(gateway, key, [USER], stream=True)
        assert "out of memory" in streamed.text


class Waiting(Backend):
    """Samples one token and then waits to be cancelled."""

    weight_version = 0

    def __init__(self) -> None:
        self.running = 0
        self.started = asyncio.Event()

    async def generate(self, request: Request) -> Completion:
        self.running += 1
        try:
            if request.on_tokens is not None:
                request.on_tokens([65])
            await asyncio.get_running_loop().create_future()
            raise AssertionError
        finally:
            self.running -= 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_slot(stream: bool) -> None:
    backend = Waiting()
    async with serve(backend) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60) as client:
            body = {"messages": [USER], "stream": stream}
            asking = asyncio.create_task(client.post("/chat/completions", json=body))
            while not backend.running:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        while backend.running:
            await asyncio.sleep(0.01)
        while not session.failures:
            await asyncio.sleep(0.01)
        assert session.failures[0].kind is FailureKind.CANCELLED
        assert session.recorder is not None
        assert not session.recorder.segments
        assert session.to_trajectory().stop is StopReason.CANCELLED


async def test_closing_a_chain_ends_its_requests_and_its_key() -> None:
    backend = Waiting()
    async with serve(backend) as gateway:
        key, _ = await gateway.open_session(SETTINGS)
        asking = asyncio.create_task(ask(gateway, key, [USER], stream=True))
        while not backend.running:
            await asyncio.sleep(0.01)
        await gateway.close_session(key)
        assert "chain_ended" in (await asking).text
        assert backend.running == 0
        assert (await ask(gateway, key, [USER])).status_code == 401


async def test_a_key_reaches_no_other_chain() -> None:
    async with serve(lambda turn: f"secret of {turn.chain}") as gateway:
        (one, _), (two, other) = [await gateway.open_session(SETTINGS, name=name) for name in ("a", "b")]
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
            headers = {"authorization": f"Bearer {one}"}
            first = (await client.post("/responses", json={"input": "Hi"}, headers=headers)).json()
            body = {"input": "Hi", "previous_response_id": first["id"]}
            for key, status in ((two, 400), (one, 200), ("sk-chain-x", 401), ("", 401)):
                headers = {"x-api-key": key}
                assert (await client.post("/responses", json=body, headers=headers)).status_code == status
            # The same conversation under another key continues nothing.
            message = {"role": "assistant", "content": "secret of a"}
            reply = await ask(gateway, two, [USER, message, USER])
            assert reply.json()["choices"][0]["message"]["content"] == "secret of b"
            assert other.recorder is not None
            assert other.recorder.continued == 0


async def test_streamed_deltas_are_the_parsed_message() -> None:
    texts = [
        "plain text",
        "\n\nleading lines\n",
        "<think>\nhm\n</think>\n\nsaid",
        f"before\n{call('add', a=1, b=2)}\n{call('add', a=3, b=4)}\nafter",
        f"<think>why</think>{call('add', a=1, b='<x>')}",
        "broken <tool_call>\n{not json\n</tool_call> rest",
        "a < b and [1] {2}",
        '<tool_call>\n{"name": "add"',
    ]
    agent = HFAgent("bytes", template="chatml", backend=ScriptedBackend("x"))
    from agentfly.gateway.chat import client_message

    template = agent.load_template(tools=[TOOL | {"function": {**TOOL["function"], "description": "d"}}])  # type: ignore[operator, dict-item]
    for text in texts:
        whole = client_message(template.parse_text(text), "id", template.tools)
        for step in (1, 3, 50):
            stream = ReplyStream(template, "id", ())
            deltas = [d for end in range(step, len(text) + step, step) for d in stream.add(text[:end])]
            deltas += stream.advance(whole)
            assert "".join(v for k, v in deltas if k == "thinking") == whole.thinking, text
            assert "".join(v for k, v in deltas if k == "content") == whole.text, text
            assert tuple(v for k, v in deltas if k == "call") == whole.tool_calls, text


async def test_stop_strings_are_not_part_of_the_reply() -> None:
    async with serve(["one Observation: two", "three"]) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        for stream in (False, True):
            answer = await ask(gateway, key, [USER], stop=["Observation:"], stream=stream)
            if not stream:
                message = answer.json()["choices"][0]["message"]
                assert message["content"] == "one "
                assert (await ask(gateway, key, [USER, message, USER], stop=["Observation:"])).is_success
        assert session.recorder is not None
        assert session.recorder.continued == 1


async def test_our_client_backend_samples_token_ids_through_a_server() -> None:
    served = ScriptedBackend(["Hello."], context_length=4000)
    async with serve(served, api_key="secret", record=False) as gateway:
        backend = ClientBackend("scripted", gateway.base_url, api_key="secret", prompt_format="tokens")
        agent = HFAgent("bytes", template="chatml", backend=backend)
        (chain,) = await agent.run("Hi")
        assert (chain.prediction, chain.untrainable) == ("Hello.", None)
        messages = HFAgent("m", backend="client", backend_config={"base_url": gateway.base_url, "api_key": "secret"})
        (chain,) = await messages.run("Hi")
        assert (chain.prediction, chain.untrainable) == ("Hello.", None)
        await agent.close()
        await messages.close()


async def test_an_address_of_other_machines_needs_a_key() -> None:
    agent = HFAgent("bytes", template="chatml", backend=ScriptedBackend("x"))
    for host in ("0.0.0.0", "::", "127.example.com", "192.168.1.2"):
        with pytest.raises(ConfigError, match="give an api_key"):
            Gateway(agent.backend, agent.load_template, host=host, api_key="")


async def test_without_a_key_of_the_gateway_the_keys_of_clients_name_their_chains() -> None:
    async with serve("hello", api_key="") as gateway:
        for key in ("sk-one", "sk-two", "sk-one"):
            assert (await ask(gateway, key, [USER])).is_success
        assert [len(session.to_trajectory().turns) for session in gateway.sessions.values()] == [2, 1]
        assert not any("sk-" in name for name in gateway.sessions)  # the names are saved


async def test_chains_of_one_key_are_told_apart_by_header() -> None:
    async with serve(lambda turn: f"chain {turn.chain}", api_key="k") as gateway:
        for name in ("one", "two", "one"):
            headers = {"authorization": "Bearer k", "x-agentfly-chain": name}
            async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers) as client:
                body = {"messages": [USER], "temperature": 0.5}
                reply = (await client.post("/chat/completions", json=body)).json()
            assert reply["choices"][0]["message"]["content"] == f"chain {name}"
        chains = {name: session.to_trajectory() for name, session in gateway.sessions.items()}
        assert {name: len(chain.turns) for name, chain in chains.items()} == {"one": 2, "two": 1}
        assert chains["two"].prediction == "chain two"


async def test_requests_that_sample_nothing_create_no_chain() -> None:
    async with serve("hello", api_key="k") as gateway, httpx.AsyncClient(timeout=60) as client:
        for path, status in (("v1/models", 200), ("metrics", 200), ("v1/chat/completions", 405), ("v1/nothing", 404)):
            for key, expected in (("k", status), ("other", 401)):
                headers = {"authorization": f"Bearer {key}", "x-agentfly-chain": "one"}
                answer = await client.get(f"{gateway.url}/{path}", headers=headers)
                assert answer.status_code == expected, (path, key)
        assert not gateway.sessions
        assert (await ask(gateway, "k", [USER])).is_success
        assert list(gateway.sessions) == [""]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat/completions", "responses", "messages"])
async def test_arguments_written_as_text_have_the_types_of_the_request_s_schema(api: str, stream: bool) -> None:
    values = {
        "limit": "7",
        "flag": "True",
        "ratio": "0.5",
        "tags": "['a']",
        "note": "7",
        "none": "None",
        "big": "1e999",
    }
    parameters = {
        "type": "object",
        "properties": {
            "limit": {"$ref": "#/$defs/count"},
            "flag": {"type": "boolean"},
            "ratio": {"type": ["number", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": "string"},
            "none": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "big": {"type": "number"},
        },
        "$defs": {"count": {"type": "integer"}},
    }
    tool = {"name": "find", "description": "d", "parameters": parameters, "input_schema": parameters}
    tools = [{"type": "function", "function": tool}] if api == "chat/completions" else [{"type": "function", **tool}]
    if api == "messages":
        tools = [tool]
    async with serve(call("find", **values)) as gateway:
        key, session = await gateway.open_session(SETTINGS)
        headers = {"authorization": f"Bearer {key}"}
        body = {"input" if api == "responses" else "messages": [USER], "tools": tools, "stream": stream}
        async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=60) as client:
            response = await client.post(f"/{api}", json={**body, "max_tokens": 200})
        assert response.is_success, response.text
    converted = {"limit": 7, "flag": True, "ratio": 0.5, "tags": ["a"], "note": "7", "none": None, "big": "1e999"}
    assert dict(session.last_message.tool_calls[0].arguments) == converted
    # As an object in the Messages API, else as JSON text in JSON.
    texts = (
        json.dumps(converted),
        json.dumps(json.dumps(converted))[1:-1],
        json.dumps(json.dumps(json.dumps(converted)))[1:-1],
    )
    body = response.text.replace(", ", ",").replace(": ", ":")
    assert any(text.replace(", ", ",").replace(": ", ":") in body for text in texts), response.text
    assert session.recorder is not None
    sampled = session.recorder.segments[0].spans[-1].messages[0]
    assert dict(sampled.tool_calls[0].arguments) == values  # the record has what the model wrote
