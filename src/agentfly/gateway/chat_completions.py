"""The Chat Completions API of OpenAI, with vLLM's token ids; and /completions for prompts of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentfly.gateway import chat
from agentfly.gateway.chat import ApiError, ChatReply, ChatRequest, Delta
from agentfly.templates.template import Template
from agentfly.types import Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a request to /chat/completions. Raises ApiError."""
    messages = chat.parse_messages(chat.get_list(body, "messages"), _parse_message)
    tools = []
    for tool in chat.get_list(body, "tools"):
        function = chat.get(tool, "function", dict, {})
        tools.append(chat.parse_schema(function.get("name"), function.get("description"), function.get("parameters")))
    if body.get("tool_choice") == "none":
        tools = []
    response_format = chat.get(body, "response_format", dict, {})
    if response_format.get("type", "text") != "text":
        raise ApiError(
            "'response_format' is not supported: sampling is not constrained; ask for the format in the prompt"
        )
    if chat.get(body, "top_logprobs", int, 0):
        raise ApiError("'top_logprobs' is not supported; 'logprobs' returns those of the sampled tokens")
    max_tokens = chat.get(body, "max_completion_tokens", int, chat.get(body, "max_tokens", int))
    return ChatRequest(
        messages,
        tuple(tools),
        chat.parse_sampling(body, max_tokens),
        model=chat.get(body, "model", str, ""),
        stream=chat.get(body, "stream", bool, False),
        include_usage=bool(chat.get(body, "stream_options", dict, {}).get("include_usage")),
        logprobs=chat.get(body, "logprobs", bool, False),
        token_ids=chat.get(body, "return_token_ids", bool, False),
    )


def _parse_message(item: Mapping[str, Any], messages: list[Message], names: dict[str, str]) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(f"a message has the role {role!r:.40}; roles are {', '.join(_ROLES)}")
    calls = []
    for call in chat.get_list(item, "tool_calls"):
        function = chat.get(call, "function", dict, {})
        calls.append(chat.parse_call(function.get("name"), function.get("arguments"), call.get("id")))
        names[calls[-1].id] = calls[-1].name
    call_id = chat.get(item, "tool_call_id", str, "")
    thinking = chat.get(item, "reasoning_content", str) or chat.get(item, "reasoning", str, "")
    name = names.get(call_id, "") if role == "tool" else ""
    content = chat.parse_text(item.get("content"), f"{role} message", ("text", "input_text", "refusal"))
    messages.append(Message(_ROLES[role], content, tuple(calls), thinking, name, call_id))  # type: ignore[arg-type]


def format_reply(reply: ChatReply) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.text or None, "refusal": None}
    if reply.message.thinking:
        message["reasoning_content"] = reply.message.thinking
    if reply.message.tool_calls:
        message["tool_calls"] = [_format_call(call) for call in reply.message.tool_calls]
    elif not reply.message.text:
        message["content"] = ""
    choice = {"index": 0, "message": message, "finish_reason": reply.finish, **_token_fields(reply)}
    out = {**_header(reply.request, "chat.completion"), "choices": [choice], "usage": format_usage(reply)}
    return {**out, "prompt_token_ids": list(reply.prompt)} if reply.request.token_ids else out


class ChatCompletionsStream:
    """Writes the chunks of a streamed response."""

    def __init__(self, request: ChatRequest) -> None:
        self._header = _header(request, "chat.completion.chunk")
        self._calls = 0

    def start(self) -> Iterator[dict[str, Any]]:
        yield self._chunk({"role": "assistant", "content": ""})

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        kind, value = delta
        if isinstance(value, ToolCall):
            yield self._chunk({"tool_calls": [{"index": self._calls, **_format_call(value)}]})
            self._calls += 1
        else:
            yield self._chunk({"content" if kind == "content" else "reasoning_content": value})

    def finish(self, reply: ChatReply) -> Iterator[dict[str, Any] | str]:
        last = self._chunk({}, finish_reason=reply.finish, **_token_fields(reply))
        yield {**last, "prompt_token_ids": list(reply.prompt)} if reply.request.token_ids else last
        if reply.request.include_usage:
            yield {**self._header, "choices": [], "usage": format_usage(reply)}
        yield "[DONE]"

    def fail(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield format_error(error)

    def _chunk(self, delta: Mapping[str, Any], finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": dict(delta), "finish_reason": finish_reason, **fields}
        return {**self._header, "choices": [choice]}


def format_error(error: ApiError) -> dict[str, Any]:
    """The body of an error response."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def format_usage(reply: ChatReply) -> dict[str, int]:
    prompt, sampled = len(reply.prompt), len(reply.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _header(request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{request.id}", "object": kind, "created": request.created, "model": request.model}


def _format_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": chat.dump_arguments(call)}}


def _token_fields(reply: ChatReply) -> dict[str, Any]:
    """Log-probabilities and ids of the sampled tokens, as far as the request asks for them."""
    out: dict[str, Any] = {"logprobs": None}
    if reply.request.logprobs:
        out["logprobs"] = {"content": chat.format_logprobs(reply.completion, reply.template), "refusal": None}
    if reply.request.token_ids:
        out["token_ids"] = [int(token) for token in reply.completion.token_ids]
    return out


# ── /completions: token ids in, token ids and log-probabilities out ──


def parse_completion(body: Mapping[str, Any], template: Template) -> ChatRequest:
    """Read the body of a request to /completions. Raises ApiError."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        try:
            prompt = template.codec.encode(prompt)
        except UnicodeEncodeError as error:
            raise ApiError(f"the prompt is not valid text: {error}") from None
    size = template.codec.vocab_size
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int and 0 <= t < size for t in prompt):
        raise ApiError(f"'prompt' must be a text or a list of token ids below {size}, not {prompt!r:.80}")
    stop_ids = chat.get(body, "stop_token_ids", list, [])
    if len(stop_ids) > 64 or not all(type(token) is int and 0 <= token < size for token in stop_ids):
        raise ApiError(f"'stop_token_ids' must be a list of at most 64 token ids below {size}, not {stop_ids!r:.80}")
    logprobs = chat.get(body, "logprobs", (int, bool), 0)
    if logprobs not in (0, 1):
        raise ApiError("'logprobs' may be 0 or 1: only those of the sampled tokens are returned")
    return ChatRequest(
        sampling=chat.parse_sampling(body, chat.get(body, "max_tokens", int, 16)),
        model=chat.get(body, "model", str, ""),
        stream=chat.get(body, "stream", bool, False),
        logprobs=bool(logprobs),
        token_ids=chat.get(body, "return_token_ids", bool, False),
        prompt_ids=prompt,
        stop_ids=frozenset(stop_ids) or None,
    )


def format_completion(reply: ChatReply) -> dict[str, Any]:
    """The body of a response of /completions, which is also the only chunk of a stream."""
    ids = [int(token) for token in reply.completion.token_ids]
    choice: dict[str, Any] = {"index": 0, "text": reply.message.text, "finish_reason": reply.finish, "logprobs": None}
    if reply.request.logprobs:
        tokens = [reply.template.codec.decode([token]) for token in ids]
        values = [float(logprob) for logprob in reply.completion.logprobs]
        choice["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}
    if reply.request.token_ids:
        choice["token_ids"] = ids
        choice["prompt_token_ids"] = list(reply.prompt)
    out = {**_header(reply.request, "text_completion"), "choices": [choice], "usage": format_usage(reply)}
    return {**out, "id": f"cmpl-{reply.request.id}"}
