"""What a hostile or broken client sends is answered or cut off; it neither stops the server nor reaches a chain."""

import ast
import asyncio
import base64
import contextlib
import hmac
import json
import os
import pickle
import random
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentfly
from agentfly.gateway import server
from agentfly.rollout import ChainSettings
from tests.gateway.conversations import PARAMETERS, SETTINGS, serve

PATHS = ("chat/completions", "responses", "messages", "completions")
WORDS = [None, True, -1, 0, 1e308, float("inf"), 2**70, "", "x", "\ud800", "<|im_end|>", [], {}, [[]], [None], {"a": 1}]
FIELDS = (
    "model", "messages", "input", "tools", "tool_choice", "stream", "stop", "temperature", "top_p", "top_k", "seed",
    "max_tokens", "system", "instructions", "previous_response_id", "prompt", "logprobs", "n", "response_format",
)  # fmt: skip
MESSAGES: list[Any] = [
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
    {"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": [1]}]},
    {"role": "tool", "tool_call_id": "c", "content": "secret?"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"role": "robot", "content": 1},
]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"name": "add", "input_schema": PARAMETERS},
    {"type": "function", "name": "add", "parameters": {"type": 7}},
    {"function": {"name": "\ud800"}},
]


def draw(rng: random.Random, depth: int = 0) -> Any:
    """A value that a field may or may not accept."""
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 4:
        return rng.choice(WORDS)
    if kind == 4:
        return rng.choice(MESSAGES)
    if kind == 5:
        return [draw(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(FIELDS): draw(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(TOOLS)


def draw_body(rng: random.Random) -> bytes:
    """The body of a request: sometimes nearly right, sometimes not even JSON."""
    body: dict[str, Any] = {"messages": [rng.choice(MESSAGES[:4]) for _ in range(rng.randrange(1, 4))]}
    body["input"] = rng.choice(["Hi", [rng.choice(MESSAGES) for _ in range(rng.randrange(4))]])
    body["prompt"] = rng.choice(["Hi", [1, 2, 3], [-1], [10**9]])
    if rng.random() < 0.3:
        body["tools"] = [rng.choice(TOOLS) for _ in range(rng.randrange(3))]
    for _ in range(rng.randrange(5)):
        body[rng.choice(FIELDS)] = draw(rng)
    data = json.dumps(body).encode()
    change = rng.randrange(12)
    if change == 0:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(3) + data[at + 3 :]
    if change == 1:
        return data[: rng.randrange(len(data))]
    return b"[" * 5000 if change == 2 else data


async def send_fuzz(count: int, seed: int) -> None:
    """Send random requests with the key of one chain, and check that the server and another chain are unharmed.

    Some clients close the connection before they have the answer.
    """
    rng = random.Random(seed)
    async with serve(lambda turn: f"I belong to {turn.chain}.") as gateway:
        settings = SETTINGS
        key, fuzzed = await gateway.open_session(settings, name="fuzzed")
        other, untouched = await gateway.open_session(settings, name="untouched")
        statuses: set[int] = set()
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:

            async def send() -> None:
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                headers["x-agentfly-chain"] = rng.choice(["", "untouched", "x" * 5000])
                if rng.random() < 0.1:
                    headers["authorization"] = rng.choice(["", "Bearer", "Basic x", "Bearer " + "k" * 3000])
                method = rng.choice(["POST"] * 20 + ["GET", "DELETE", "PATCH"])
                path = "/" + rng.choice([*PATHS * 5, "models", "nothing", "%00", "../v1/x"])
                request = client.request(method, path, content=draw_body(rng), headers=headers)
                if rng.random() < 0.02:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(request, rng.random() / 100)
                    return
                answer = await request
                statuses.add(answer.status_code)
                assert answer.status_code != 500, answer.text
                assert "untouched." not in answer.text

            for start in range(0, count, 20):
                await asyncio.gather(*(send() for _ in range(min(20, count - start))))
            assert {200, 400, 401, 404} <= statuses
            headers = {"authorization": f"Bearer {other}"}
            body = {"messages": [{"role": "user", "content": "Hi"}]}
            reply = await client.post("/chat/completions", json=body, headers=headers)
        assert reply.json()["choices"][0]["message"]["content"] == "I belong to untouched."
        assert untouched.recorder is not None
        assert len(untouched.recorder.turns) == 1
        assert not fuzzed._requests
        assert fuzzed.recorder is not None
        for segment in fuzzed.recorder.close():
            assert len(segment.mask) == len(segment.tokens)
        while gateway._server.server_state.connections:
            await asyncio.sleep(0.01)


async def test_fuzzed_requests_are_answered() -> None:
    await send_fuzz(300, seed=1)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_ten_thousand_fuzzed_requests_are_answered() -> None:
    await send_fuzz(10_000, seed=2)


CALLS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "chat/completions": ({"messages": [{"role": "user", "content": "Hi"}]}, ("error", "code")),
    "responses": ({"input": "Hi"}, ("error", "code")),
    "messages": ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}, ("error", "type")),
}
UNKNOWN_RESULT: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "tool", "tool_call_id": "zzz", "content": "5"}]},
    "responses": {"input": [{"type": "function_call_output", "call_id": "zzz", "output": "5"}]},
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "zzz", "content": "5"}]}]
    },
}


@pytest.mark.parametrize("path", CALLS)
async def test_every_refusal_has_the_error_format_of_its_api(path: str) -> None:
    good, where = CALLS[path]
    anthropic = path == "messages"
    plain = "invalid_request_error" if anthropic else "invalid_request"
    text = json.dumps(good)
    surrogate = text.replace("Hi", "\\ud800")
    cases: list[tuple[str, dict[str, str], int, str]] = [
        (text, {"authorization": "Bearer x"}, 401, "authentication_error" if anthropic else "invalid_api_key"),
        (text, {"authorization": ""}, 401, "authentication_error" if anthropic else "invalid_api_key"),
        (text, {"content-type": "text/plain"}, 415, "invalid_request_error" if anthropic else "unsupported_media_type"),
        (text, {"content-encoding": "gzip"}, 415, "invalid_request_error" if anthropic else "unsupported_media_type"),
        *((body, {}, 400, plain) for body in ("", "{", "[]", "null", "{}", '{"x":' + "[" * 9999, surrogate)),
        *((f'{{"{field}": {value}, {text[1:]}', {}, 400, plain) for field, value in (
            ("temperature", "NaN"), ("temperature", "1e999"), ("temperature", '"hot"'), ("top_k", '"a"'),
            ("seed", "9" * 5000), ("stream", '"yes"'), ("tools", '"add"'), ("tools", "[1]"), ("stop", "[1]"),
            ("n", "2"),
        )),
        (json.dumps({**good, **UNKNOWN_RESULT[path]}), {}, 400, plain),
        (json.dumps({**good, "max_tokens": 0, "max_completion_tokens": 0, "max_output_tokens": 0}), {}, 400, plain),
    ]  # fmt: skip
    async with serve("x") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as client:
            for body, headers, status, expected in cases:
                sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
                answer = await client.post(f"/{path}", content=body, headers=sent)
                assert answer.status_code == status, (body[:200], answer.text)
                assert answer.json()[where[0]][where[1]] == expected, (body[:200], answer.text)
                assert answer.json().get("type") == ("error" if anthropic else None)
            for method, at, status in (("GET", path, 405), ("POST", f"{path}/nothing", 404)):
                answer = await client.request(method, f"/{at}", headers={"authorization": f"Bearer {key}"})
                assert (answer.status_code, answer.json().get("type")) == (status, "error" if anthropic else None)
            assert (await client.post(f"/{path}", json=good, headers={"x-api-key": key})).is_success
        assert session.recorder is not None
        assert len(session.recorder.turns) == 1


KEY = "schlüssel-ключ"
RIGHT = KEY.encode()
WRONG_KEYS = [
    RIGHT[:-1], RIGHT + b"x", RIGHT.upper(), RIGHT[::-1], KEY.encode("utf-7"), b"schl\xfcssel", b"\xff\xfe",
    b"k" * 5000, b"sk-chain-x", b"None", RIGHT + b"," + RIGHT,
]  # fmt: skip
"""Beginnings, extensions, other encodings, and bytes that are no text."""


async def test_keys_are_compared_as_bytes_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, Any]] = []
    genuine = hmac.compare_digest

    def compare(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return genuine(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    body = CALLS["chat/completions"][0]
    async with serve("x", api_key=KEY) as gateway:
        chain_key, _ = await gateway.open_session(SETTINGS)
        url = f"{gateway.base_url}/chat/completions"
        async with httpx.AsyncClient(timeout=60) as client:
            for key in WRONG_KEYS:
                for headers in ({"authorization": b"Bearer " + key}, {"authorization": key}, {"x-api-key": key}):
                    answer = await client.post(url, json=body, headers=headers)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), headers
            for headers in (
                {},
                {"authorization": b""},
                {"x-api-key": b""},
                {"authorization": b"Bearer"},
                {"authorization": b"Basic " + RIGHT},
                {"authorization": RIGHT},
                {"authorization": b"Bearer " + chain_key[:-1].encode()},
            ):
                assert (await client.post(url, json=body, headers=headers)).status_code == 401, headers
            assert len(compared) == 3 * len(WRONG_KEYS) + 7
            for headers in ({"authorization": b"bearer  " + RIGHT}, {"x-api-key": RIGHT}):
                assert (await client.post(url, json=body, headers=headers)).is_success
            assert (await client.post(url, json=body, headers={"x-api-key": chain_key})).is_success
        # Digests, whose comparison and lookup say nothing about the keys, their length included.
        assert all(type(digest) is bytes and len(digest) == 32 for pair in compared for digest in pair)
        assert [type(digest) is bytes and len(digest) == 32 for digest in gateway._keys] == [True]


class _Exploit:
    """Creates a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


async def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    pickled = [pickle.dumps(_Exploit(tmp_path / "loaded"), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    async with serve("x") as gateway:
        key, session = await gateway.open_session(SETTINGS)
        async with httpx.AsyncClient(base_url=gateway.base_url, headers={"x-api-key": key}, timeout=60) as client:
            for path in PATHS:
                for data in pickled:
                    for kind, status in (("application/json", 400), ("application/octet-stream", 415)):
                        answer = await client.post(f"/{path}", content=data, headers={"content-type": kind})
                        assert answer.status_code == status
                    text = base64.b64encode(data).decode()
                    message = {"role": "user", "content": text}
                    fields = {"messages": [message], "input": text, "prompt": text, "model": text, "max_tokens": 5}
                    assert (await client.post(f"/{path}", json=fields)).status_code < 500
        assert session.recorder is not None
        assert session.recorder.turns
    assert not os.listdir(tmp_path)
    pickle.loads(pickled[-1])  # the exploit works
    assert os.listdir(tmp_path)


def test_code_that_reads_requests_imports_nothing_that_loads_objects() -> None:
    """The servers, what decodes their bodies, and the types and parsers that values of a body become."""
    package = Path(agentfly.__file__).parent
    files = [
        package / name
        for name in ("gateway/http_server.py", "backends/http_body.py", "types.py", "integrations/openenv.py")
    ]
    for folder in ("gateway", "integrations/mcp", "templates/parsers"):
        files += sorted((package / folder).rglob("*.py"))
    forbidden = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "torch", "copyreg", "_pickle"}
    calls = {"eval", "exec", "compile", "__import__"}
    assert len(files) > 20
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                names = {node.func.id} & calls
            assert not names & (forbidden | calls), f"{file.relative_to(package)}:{getattr(node, 'lineno', 0)}: {names}"


async def test_a_header_cannot_be_injected_and_malformed_requests_end_their_connection() -> None:
    async with serve("x", api_key="k") as gateway:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer k\r\n"
        bodies = (
            b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
            (head + "x-agentfly-chain: a\n\x00b: c\r\n\r\n").encode(),
            (head + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}").encode(),
            (head + "Content-Length: -1\r\n\r\n{}").encode(),
            (head + "x: " + "y" * 200_000).encode(),
        )
        for sent in bodies:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):  # the server does not read the rest of a long header
                async with asyncio.timeout(60):
                    assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()
        assert not gateway.sessions


async def test_a_body_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BYTES", 1000)
    async with serve("x") as gateway:
        key, _ = await gateway.open_session(SETTINGS)
        async with httpx.AsyncClient(headers={"x-api-key": key}, timeout=60) as client:
            body = {"messages": [{"role": "user", "content": "x" * 2000}]}
            answer = await client.post(f"{gateway.base_url}/messages", json=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


async def test_clients_that_send_or_read_slowly_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.2)
    async with serve("x") as gateway:
        key, _ = await gateway.open_session(SETTINGS)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {key}\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 1000\r\n"
        for sent, answered in (("", b""), (head, b""), (head + "\r\n{", b"HTTP/1.1 408")):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(sent.encode())
            async with asyncio.timeout(60):
                assert (await reader.read()).startswith(answered)
            writer.close()
            await writer.wait_closed()


async def test_a_stream_that_is_not_read_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.2)
    async with serve("word " * 40_000, chunk=None) as gateway:
        key, session = await gateway.open_session(ChainSettings())
        # Small buffers in the kernel: they hold back what is written before the client has read it.
        gateway._server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nx-api-key: {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", gateway.port))
            connection.sendall((head + body).encode())
            assert session.recorder is not None
            while not session.recorder.turns or gateway._server.server_state.connections:
                await asyncio.sleep(0.01)


async def test_pages_in_a_browser_cannot_use_a_server_without_a_key() -> None:
    async with serve("x", api_key="", record=False) as gateway, httpx.AsyncClient(timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        url = f"{gateway.base_url}/chat/completions"
        for headers, status in (
            ({}, 200),
            ({"origin": "https://evil.example"}, 403),
            ({"host": "evil.example"}, 403),
            ({"host": "evil.example:80"}, 403),
            ({"content-type": "text/plain"}, 415),
        ):
            answer = await client.post(
                url, content=json.dumps(body), headers={"content-type": "application/json", **headers}
            )
            assert answer.status_code == status, headers
            if status != 200:
                assert answer.json()["error"]["message"]
