"""Requests of the OpenAI API, and the errors that a response status stands for; `openai_responses` parses the rest."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import Any

import httpx

from agentfly.backends.base import Request
from agentfly.backends.http_body import BodyError, parse_json
from agentfly.backends.retrying import parse_retry_after
from agentfly.errors import BackendFault, ConfigError
from agentfly.types import Message, Sampling

_CONTEXT_EXCEEDED = re.compile(
    r"context.?length|maximum context|max_model_len|context window|prompt is too long", re.IGNORECASE
)


class ServerUnavailable(BackendFault):
    """The server cannot be reached, does not answer, or keeps failing after all retries."""


class Retryable(BackendFault):
    """A failure that a retry may cure."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait
        """Seconds that the server asks to wait; None if it does not."""


class MalformedResponse(Retryable):
    """A response that violates the protocol."""


class Rejected(BackendFault):
    """The server understood the request and rejects it."""

    def __init__(self, message: str, context_exceeded: bool) -> None:
        super().__init__(message)
        self.context_exceeded = context_exceeded
        """Whether the prompt exceeds the context, which no other request format cures."""


class Dialect(enum.Enum):
    """Request formats of chat servers, from the most to the least capable."""

    EXTENDED = "extended"
    """Token ids, all sampling fields, thinking in the history: vLLM, and servers that ignore unknown fields."""
    OPENAI = "openai"
    """Only the fields of OpenAI."""
    BASIC = "basic"
    """The same with `max_tokens`, the former name of `max_completion_tokens`."""


def completions_body(model: str, request: Request, max_tokens: int) -> dict[str, Any]:
    """The body of a request to /completions: a prompt of token ids, to be answered with ids and log-probabilities."""
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": max_tokens,
        **_sampling_fields(request.sampling, request.stop_ids, include_defaults=True),
        "add_special_tokens": False,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    return {**body, "stream": True} if request.on_tokens else body


def chat_body(model: str, request: Request, dialect: Dialect, exact: bool) -> dict[str, Any]:
    """The body of a request to /chat/completions.

    exact: ask for token ids. Such a response is not streamed: servers omit some ids from streams, and an observer must
    not change what is recorded.
    """
    extended = dialect is Dialect.EXTENDED
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": [message_fields(message, extended) for message in request.messages],
        **_sampling_fields(sampling, request.stop_ids, include_defaults=extended),
    }
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    if sampling.max_tokens is not None:
        body["max_completion_tokens" if dialect is Dialect.OPENAI else "max_tokens"] = sampling.max_tokens
    if extended and exact:
        body |= {"return_token_ids": True, "logprobs": True}
    elif request.on_text:
        body["stream"] = True
    if extended and sampling.stop:
        body["include_stop_str_in_output"] = True
    return body


def _sampling_fields(sampling: Sampling, stop_ids: frozenset[int], *, include_defaults: bool) -> dict[str, Any]:
    """The sampling fields of a request.

    include_defaults: also send filters that are off. vLLM takes omitted ones from the model's `generation_config.json`,
    but not every server knows them all.
    """
    body: dict[str, Any] = {"temperature": sampling.temperature}
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        if include_defaults or getattr(sampling, name) != off:
            body[name] = getattr(sampling, name)
    if body.get("top_k") == 0:
        body["top_k"] = -1  # all servers take -1 as off; some reject 0
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if stop_ids:
        body["stop_token_ids"] = sorted(stop_ids)
    return body


def message_fields(message: Message, extended: bool) -> dict[str, Any]:
    """A message in the format of the API: arguments as text, images as `image_url` parts."""
    out = message.to_dict()
    if not isinstance(message.content, str):
        out["content"] = [
            {"type": "text", "text": block}
            if isinstance(block, str)
            else {"type": "image_url", "image_url": {"url": block.url}}
            for block in message.content
        ]
    if message.tool_calls:
        # A call that could not be parsed is sent without arguments: servers parse the text, and bad JSON in the history
        # would fail every later request of the chain.
        out["tool_calls"] = []
        for call in message.tool_calls:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            function = {"name": call.name or "unknown", "arguments": arguments}
            out["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    thinking = out.pop("reasoning_content", "")
    if extended and thinking:  # servers use one name or the other
        out |= {"reasoning_content": thinking, "reasoning": thinking}
    if message.role == "tool" and not extended:
        out.pop("name", None)
    return out


def status_error(response: httpx.Response, text: str, *, model: str, api_key: str | None = None) -> Exception:
    """The exception for a response with an error status. If its text contains the API key, the key is masked."""
    status = response.status_code
    try:
        data = parse_json(text)
    except BodyError:
        data = None
    detail = error_message(data) if isinstance(data, Mapping) else text
    detail = (detail.replace(api_key, "…") if api_key else detail)[:500]
    message = f"{response.url} answered {status}: {detail or response.reason_phrase}"
    if status in (408, 429) or status >= 500:
        return Retryable(message, parse_retry_after(response.headers.get("retry-after", "")))
    if status in (401, 403):
        return ConfigError(f"{message}; check api_key= or OPENAI_API_KEY")
    if status in (404, 405) or status < 400:
        return ConfigError(f"{message}; check model={model!r}, and that base_url= ends as the server's does (/v1)")
    if _CONTEXT_EXCEEDED.search(detail):
        return Rejected(f"{message}; allow fewer turns or less max_tokens, or serve a longer context", True)
    return Rejected(message, False)


def error_message(data: Mapping[str, Any]) -> str:
    """The server's own message in the body of an error."""
    error = data.get("error", data)
    message = (error.get("message") or error.get("detail")) if isinstance(error, Mapping) else error
    return str(message or json.dumps(data))


def reason(error: Exception) -> str:
    """The message of an exception, or its class name if it has none."""
    return str(error) or type(error).__name__
