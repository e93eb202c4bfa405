"""The OpenAI wire: what a request says in it, and what an answer means.

No connection is made here. What a server gets wrong is a `BackendFault`: a `Passing` one where asking again
may help.
"""

from __future__ import annotations

import enum
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from agentfly.backend import Request
from agentfly.errors import BackendFault, ConfigError, DataError
from agentfly.types import Finish, Image, Message, Sampling, ToolCall, content_of

_FINISHES = {
    "stop": Finish.STOP,
    "tool_calls": Finish.STOP,
    "function_call": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.ABORTED,
}
_TOO_LONG = re.compile(
    r"context.?length|maximum context|max_model_len|context window|prompt is too long", re.IGNORECASE
)


class Passing(BackendFault):
    """Trouble that may pass when asked again."""

    def __init__(self, words: str, wait: float | None = None) -> None:
        super().__init__(words)
        self.wait = wait
        """Seconds that the server asked us to wait; None: it did not say."""


class Refused(BackendFault):
    """The server understood the request, and will not have it."""

    def __init__(self, words: str, too_long: bool) -> None:
        super().__init__(words)
        self.too_long = too_long
        """Whether the prompt outgrew the context, which no other wording cures."""


class Dialect(enum.Enum):
    """How much a chat server understands, richest first."""

    EXTENDED = "extended"
    """Ids, every sampling field, thinking in the history: vLLM, and servers that ignore unknown fields."""
    OPENAI = "openai"
    """OpenAI's own fields only."""
    BASIC = "basic"
    """The same with `max_tokens`, which OpenAI has since renamed."""


# What we send.


def completions_body(model: str, request: Request, max_tokens: int) -> dict[str, Any]:
    """A prompt of ids, asking for the sampled ids and their log-probabilities."""
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": max_tokens,
        **_sampling(request.sampling, request.stop_ids, everything=True),
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    return {**body, "stream": True} if request.on_tokens else body


def chat_body(model: str, request: Request, dialect: Dialect, exact: bool) -> dict[str, Any]:
    """A conversation, in words that a server of this dialect knows.

    Where ids are asked for, nothing is streamed: servers leave some out then, and watching must not change the record.
    """
    extended = dialect is Dialect.EXTENDED
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message_out(message, extended) for message in request.messages],
        **_sampling(sampling, request.stop_ids, everything=extended),
    }
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    if sampling.max_tokens is not None:
        limit = "max_completion_tokens" if dialect is Dialect.OPENAI else "max_tokens"
        body[limit] = sampling.max_tokens
    if extended and exact:
        body |= {"return_token_ids": True, "logprobs": True}
    elif request.on_text:
        body["stream"] = True
    if extended and sampling.stop:
        body["include_stop_str_in_output"] = True
    return body


def _sampling(sampling: Sampling, stop_ids: frozenset[int], *, everything: bool) -> dict[str, Any]:
    """The sampling fields; without `everything`, only those that a plain server knows or that differ.

    What is left out need not be off: vLLM fills it from the model's own `generation_config.json`.
    """
    body: dict[str, Any] = {"temperature": sampling.temperature}
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if everything or getattr(sampling, name) != off:
            body[name] = getattr(sampling, name)
    if body.get("top_k") == 0:
        body["top_k"] = -1  # every server reads -1 as all; some refuse 0
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if stop_ids:
        body["stop_token_ids"] = sorted(stop_ids)
    return body


def _message_out(message: Message, extended: bool) -> dict[str, Any]:
    """A message as the API wants it: arguments as text, pictures as `image_url` parts."""
    out = message.to_dict()
    if not isinstance(message.content, str):
        out["content"] = [_part_out(part) for part in message.content]
    if message.tool_calls:
        out["tool_calls"] = [_call_out(call) for call in message.tool_calls]
    thinking = out.pop("reasoning_content", "")
    if extended and thinking:  # some servers read the one name, some the other
        out |= {"reasoning_content": thinking, "reasoning": thinking}
    if message.role == "tool" and not extended:
        out.pop("name", None)
    return out


def _part_out(part: str | Image) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": part.url}}


def _call_out(call: ToolCall) -> dict[str, Any]:
    # A call that could not be read goes back without arguments: servers parse the text, and bad JSON in the
    # history would kill every later request of the chain.
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    function = {"name": call.name or "unknown", "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


# What comes back.


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply of a chat server."""

    message: Message
    finish: Finish
    ids: Sequence[int] = ()
    """Empty where the server did not return all of prompt, ids and log-probabilities."""
    logprobs: Sequence[float] = ()
    prompt_ids: Sequence[int] | None = None


async def read_answer(response: httpx.Response, request: Request) -> Answer:
    """Read a chat completion, whole or streamed."""
    streamed = "text/event-stream" in response.headers.get("content-type", "")
    data = await _put_together(response, request) if streamed else await read_object(response)
    choice = _choice(data)
    message, finish = _message_in(choice.get("message")), _finish(choice.get("finish_reason"))
    if request.on_text and not streamed and message.text:
        request.on_text(message.text)
    ids, prompt = choice.get("token_ids"), data.get("prompt_token_ids")
    entries = _field(choice.get("logprobs"), "content") or ()
    logprobs = [_field(entry, "logprob") for entry in entries]
    if not ids or not prompt or len(ids) != len(logprobs) or None in logprobs:
        return Answer(message, finish)
    return Answer(message, finish, ids, logprobs, prompt)


async def _put_together(response: httpx.Response, request: Request) -> dict[str, Any]:
    """A streamed answer as it would have been in one piece."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    finish, pieces = None, 0
    try:
        async with aclosing(_events(response)) as events:
            async for event in events:
                if not (event.get("choices") or event.get("error")):
                    continue
                choice = _choice(event)
                delta, finish = choice.get("delta") or {}, choice.get("finish_reason") or finish
                for name in ("content", "refusal", "reasoning_content", "reasoning"):
                    if text := _field(delta, name):
                        message[name], pieces = message.get(name, "") + str(text), pieces + 1
                for piece in _field(delta, "tool_calls") or ():
                    _add_call(calls, piece)
                    pieces += 1
                if request.on_text and _field(delta, "content"):
                    request.on_text(message["content"])
    except (httpx.TransportError, Passing) as error:
        if finish is None:
            raise _broken(pieces, "pieces", reason(error)) from error
    if finish is None:
        raise _broken(pieces, "pieces", "no finish_reason came")
    whole = {**message, "tool_calls": list(calls.values())}
    return {"choices": [{"message": whole, "finish_reason": finish}]}


def _add_call(calls: dict[int, dict[str, Any]], piece: object) -> None:
    """Add a piece to the call it belongs to: the id and the name come once, the arguments bit by bit."""
    at, function = _field(piece, "index"), _field(piece, "function")
    call = calls.setdefault(at if isinstance(at, int) else 0, {"id": "", "function": {"name": "", "arguments": ""}})
    call["id"] = call["id"] or _field(piece, "id") or ""
    for name in ("name", "arguments"):
        call["function"][name] += str(_field(function, name) or "")


@dataclass(slots=True)
class Turn:
    """A turn of sampled tokens, as it arrives."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, choice: Mapping[str, Any], request: Request) -> None:
        """Take the whole of a choice, or the next piece of it."""
        ids, logprobs = choice.get("token_ids"), _field(choice.get("logprobs"), "token_logprobs") or ()
        if choice.get("finish_reason") is not None:
            self.finish = _finish(choice["finish_reason"])
        if ids is None or len(ids) != len(logprobs) or None in logprobs:
            raise BackendFault(
                "the server did not return the ids it sampled with a log-probability for each; it must know "
                "`return_token_ids` and `logprobs` on /completions (vLLM does, from 0.10.2 on). "
                "speaks='messages' works without them, but what it samples then cannot train"
            )
        shown = choice.get("prompt_token_ids")
        if shown is not None and list(shown) != list(request.prompt):
            raise BackendFault(
                f"the server showed the model another prompt, of {len(shown)} tokens, "
                f"than the {len(request.prompt)} it was sent"
            )
        self.ids += ids
        self.logprobs += logprobs
        if ids and request.on_tokens:
            request.on_tokens(ids)


async def read_turn(response: httpx.Response, request: Request) -> Turn:
    """Read a completion, whole or streamed."""
    turn = Turn()
    if "text/event-stream" not in response.headers.get("content-type", ""):
        turn.add(_choice(await read_object(response)), request)
    else:
        await _follow(response, request, turn)
    if turn.finish is None:
        raise _broken(len(turn.ids), "tokens", "no finish_reason came")
    return turn


async def _follow(response: httpx.Response, request: Request, turn: Turn) -> None:
    """Fill the turn from a stream; a break after its finish_reason loses nothing."""
    try:
        async with aclosing(_events(response)) as events:
            async for event in events:
                if event.get("choices") or event.get("error"):
                    turn.add(_choice(event), request)
    except (httpx.TransportError, Passing) as error:
        if turn.finish is None:
            raise _broken(len(turn.ids), "tokens", reason(error)) from error


def _broken(came: int, what: str, why: str) -> BackendFault:
    """Only what nobody has seen may be sampled anew."""
    said = f"the server's answer broke off after {came} {what}: {why}"
    return BackendFault(said) if came else Passing(said)


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream. A line ends at a line feed only: JSON may hold Unicode's other separators."""
    data: list[bytes] = []
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in (line.removesuffix(b"\r") for line in lines):
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                event, data = b"\n".join(data), []
                if event != b"[DONE]":
                    yield _object(event)


async def read_object(response: httpx.Response) -> dict[str, Any]:
    """Read a body that must be a JSON object."""
    return _object(await response.aread())


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BackendFault(f"the server's answer is no JSON object: {data[:200].decode(errors='replace')!r}")
    return value


def _choice(data: Mapping[str, Any]) -> dict[str, Any]:
    """The one choice of an answer; an error may stand in its place, under status 200."""
    if error := data.get("error"):
        code = _field(error, "code")
        passing = isinstance(code, int) and (code == 429 or code >= 500)
        said = f"the server failed while sampling: {_words(data)}"
        raise Passing(said) if passing else BackendFault(said)
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BackendFault(f"the server's answer has no choice in it: {json.dumps(data)[:200]}")
    choice: dict[str, Any] = choices[0]
    return choice


def _finish(given: object) -> Finish:
    if given == "content_filter":
        raise BackendFault("the server's content filter withheld the reply (finish_reason 'content_filter')")
    if given not in _FINISHES:
        raise BackendFault(f"the server gave the finish_reason {given!r}; known are {', '.join(_FINISHES)}")
    return _FINISHES[str(given)]


def _message_in(value: object) -> Message:
    if not isinstance(value, Mapping):
        raise BackendFault(f"the server's choice holds no message, but {value!r:.200}")
    calls = [call for call in value.get("tool_calls") or () if isinstance(call, Mapping)]
    try:
        content = content_of(value.get("content") or value.get("refusal"))
    except DataError as error:
        raise BackendFault(f"the server's message cannot be read: {error}") from error
    thinking = str(value.get("reasoning_content") or value.get("reasoning") or "")
    return Message("assistant", content, tuple(ToolCall.of(call) for call in calls), thinking)


def refusal(response: httpx.Response, model: str, key: str | None = None) -> Exception:
    """The error that an answer with a bad status means; its body has been read. A key that it echoes is not told."""
    status = response.status_code
    try:
        data = response.json()
    except ValueError:
        data = None
    words = _words(data) if isinstance(data, Mapping) else response.text.strip()
    words = (words.replace(key, "…") if key else words)[:500]
    said = f"{response.url} answered {status}: {words or response.reason_phrase}"
    if status in (408, 429) or status >= 500:
        return Passing(said, _retry_after(response))
    if status in (401, 403):
        return ConfigError(f"{said}; check api_key= or OPENAI_API_KEY")
    if status in (404, 405) or status < 400:
        return ConfigError(f"{said}; check model={model!r}, and that base_url= ends as the server's does (/v1)")
    if _TOO_LONG.search(words):
        return Refused(f"{said}; allow fewer turns or less max_tokens, or serve a longer context", True)
    return Refused(said, False)


def _words(data: Mapping[str, Any]) -> str:
    """What the server says is wrong, in its own words."""
    error = data.get("error", data)
    said = (error.get("message") or error.get("detail")) if isinstance(error, Mapping) else error
    return str(said or json.dumps(data))


def reason(error: Exception) -> str:
    """What an exception says, or its name where it says nothing."""
    return str(error) or type(error).__name__


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _field(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None
