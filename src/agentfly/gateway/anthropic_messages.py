"""The Messages API of Anthropic: content blocks in, content blocks out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentfly.gateway import chat
from agentfly.gateway.chat import ApiError, ChatReply, ChatRequest, Delta
from agentfly.types import Message, ToolCall

_STOP_REASONS = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a request to /messages. Raises ApiError."""
    system = chat.check_text(chat.parse_text(body.get("system"), "system"))
    messages = chat.parse_messages(chat.get_list(body, "messages"), _parse_message, system=system)
    tools = []
    for tool in chat.get_list(body, "tools"):
        if tool.get("type", "custom") != "custom":
            raise ApiError(f"a tool of type {tool.get('type')!r:.40} is not supported; define it with an input_schema")
        tools.append(chat.parse_schema(tool.get("name"), tool.get("description"), tool.get("input_schema")))
    if chat.get(body, "tool_choice", dict, {}).get("type") == "none":
        tools = []
    return ChatRequest(
        messages,
        tuple(tools),
        chat.parse_sampling(body, chat.get(body, "max_tokens", int)),
        model=chat.get(body, "model", str, ""),
        stream=chat.get(body, "stream", bool, False),
    )


def _parse_message(item: Mapping[str, Any], messages: list[Message], names: dict[str, str]) -> None:
    """Append one turn of the model, or the tool results and the text of a user message."""
    content = item.get("content")
    blocks = chat.get_list(item, "content") if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    role = item.get("role")
    if role not in ("user", "assistant"):
        raise ApiError(f"a message has the role {role!r:.40}; roles are user and assistant")
    text = thinking = ""
    calls = []
    results = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            text += chat.get(block, "text", str, "")
        elif kind == "tool_result" and role == "user":
            call_id = chat.get(block, "tool_use_id", str, "")
            result = chat.parse_text(block.get("content"), "tool_result")
            results.append(Message("tool", result, name=names.get(call_id, ""), tool_call_id=call_id))
        elif kind == "thinking" and role == "assistant":
            thinking += chat.get(block, "thinking", str, "")
        elif kind == "tool_use" and role == "assistant":
            call = chat.parse_call(block.get("name"), block.get("input"), block.get("id"))
            names[call.id] = call.name
            calls.append(call)
        else:
            raise ApiError(f"a block of type {kind!r:.40} is not supported in a message of the {role}")
    if role == "assistant":
        messages.append(Message("assistant", text, tuple(calls), thinking))
    else:
        messages += [*results, Message("user", text)] if text or not results else results


def format_reply(reply: ChatReply) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    blocks: list[dict[str, Any]] = []
    if reply.message.thinking:
        blocks.append({"type": "thinking", "thinking": reply.message.thinking, "signature": ""})
    if reply.message.text:
        blocks.append({"type": "text", "text": reply.message.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in reply.message.tool_calls
    ]
    usage = {"input_tokens": len(reply.prompt), "output_tokens": len(reply.completion.token_ids)}
    out = {**_header(reply.request), "content": blocks, "usage": usage}
    return {**out, "stop_reason": _STOP_REASONS[reply.finish]}


class MessagesStream:
    """Writes the events of a streamed response."""

    def __init__(self, request: ChatRequest) -> None:
        self._header = _header(request)
        self._index = -1
        self._open = ""
        """The kind of the block that is open; empty if none is."""

    def start(self) -> Iterator[dict[str, Any]]:
        message = {**self._header, "content": [], "usage": {"input_tokens": 0, "output_tokens": 0}}
        yield {"type": "message_start", "message": message}

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        kind, value = delta
        if isinstance(value, ToolCall):
            block = {"type": "tool_use", "id": value.id, "name": value.name, "input": {}}
            yield from self._start_block(kind, block)
            yield self._delta({"type": "input_json_delta", "partial_json": chat.dump_arguments(value)})
            yield from self._close_block()
        elif kind == "content":
            if self._open != kind:
                yield from self._start_block(kind, {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": value})
        else:
            if self._open != kind:
                yield from self._start_block(kind, {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": value})

    def finish(self, reply: ChatReply) -> Iterator[dict[str, Any]]:
        yield from self._close_block()
        usage = {"input_tokens": len(reply.prompt), "output_tokens": len(reply.completion.token_ids)}
        stopped = {"stop_reason": _STOP_REASONS[reply.finish], "stop_sequence": None}
        yield {"type": "message_delta", "delta": stopped, "usage": usage}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield format_error(error)

    def _start_block(self, kind: str, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close_block()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _close_block(self) -> Iterator[dict[str, Any]]:
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": dict(delta)}


def format_error(error: ApiError) -> dict[str, Any]:
    """The body of an error response."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    return {"type": "error", "error": {"type": _ERROR_TYPES.get(error.status, default), "message": str(error)}}


def _header(request: ChatRequest) -> dict[str, Any]:
    fields = {"model": request.model, "stop_reason": None, "stop_sequence": None}
    return {"id": f"msg_{request.id}", "type": "message", "role": "assistant", **fields}
