"""The OpenAI wire: what a request says in it, and what an error status means; `answers` reads the rest.

No connection is made here. What a server gets wrong is a `BackendFault`: a `Passing` one where asking again
may help.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import Any

import httpx

from agentfly.backends.base import Request
from agentfly.errors import BackendFault, ConfigError
from agentfly.http_body import BodyError, parse_json
from agentfly.retrying import parse_retry_after
from agentfly.types import Image, Message, Sampling, ToolCall

_TOO_LONG = re.compile(
    r"context.?length|maximum context|max_model_len|context window|prompt is too long", re.IGNORECASE
)


class Retryable(BackendFault):
    """Trouble that may pass when asked again."""

    def __init__(self, words: str, wait: float | None = None) -> None:
        super().__init__(words)
        self.wait = wait
        """Seconds that the server asked us to wait; None: it did not say."""


class Malformed(Retryable):
    """An answer that does not follow the protocol."""


class Rejected(BackendFault):
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


# What a bad status means.


def refusal(response: httpx.Response, text: str, model: str, key: str | None = None) -> Exception:
    """The error that an answer with a bad status means. A key that its text echoes is not told."""
    status = response.status_code
    try:
        data = parse_json(text)
    except BodyError:
        data = None
    words = words_of(data) if isinstance(data, Mapping) else text
    words = (words.replace(key, "…") if key else words)[:500]
    said = f"{response.url} answered {status}: {words or response.reason_phrase}"
    if status in (408, 429) or status >= 500:
        return Retryable(said, parse_retry_after(response.headers.get("retry-after", "")))
    if status in (401, 403):
        return ConfigError(f"{said}; check api_key= or OPENAI_API_KEY")
    if status in (404, 405) or status < 400:
        return ConfigError(f"{said}; check model={model!r}, and that base_url= ends as the server's does (/v1)")
    if _TOO_LONG.search(words):
        return Rejected(f"{said}; allow fewer turns or less max_tokens, or serve a longer context", True)
    return Rejected(said, False)


def words_of(data: Mapping[str, Any]) -> str:
    """What the server says is wrong, in its own words."""
    error = data.get("error", data)
    said = (error.get("message") or error.get("detail")) if isinstance(error, Mapping) else error
    return str(said or json.dumps(data))


def reason(error: Exception) -> str:
    """What an exception says, or its name where it says nothing."""
    return str(error) or type(error).__name__
