"""The Responses API of OpenAI: items in, items out, and streams of typed events.

One turn of the model is several items: reasoning, a message, and function calls. They become one message when a request
brings them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from agentfly.gateway import chat
from agentfly.gateway.chat import ApiError, ChatReply, ChatRequest, Delta
from agentfly.types import Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a request to /responses. Raises ApiError."""
    text = body.get("input")
    items = [{"role": "user", "content": text}] if isinstance(text, str) else chat.get_list(body, "input")
    previous = chat.get(body, "previous_response_id", str, "")
    instructions = chat.get(body, "instructions", str, "")
    system = "" if previous else instructions  # those of the conversation that is continued are replaced by these
    messages = chat.parse_messages(items, _parse_item, system=system, check_results=not previous)
    tools = []
    for tool in chat.get_list(body, "tools"):
        if tool.get("type") != "function":
            raise ApiError(f"a tool of type {tool.get('type')!r:.40} is not supported; there are only functions")
        tools.append(chat.parse_schema(tool.get("name"), tool.get("description"), tool.get("parameters")))
    if body.get("tool_choice") == "none":
        tools = []
    text_format = chat.get(chat.get(body, "text", dict, {}), "format", dict, {})
    if text_format.get("type", "text") != "text":
        raise ApiError("'text.format' is not supported: sampling is not constrained; ask for the format in the prompt")
    for name in ("background", "conversation", "prompt", "top_logprobs"):
        if body.get(name):
            raise ApiError(f"{name!r} is not supported")
    return ChatRequest(
        messages,
        tuple(tools),
        chat.parse_sampling(body, chat.get(body, "max_output_tokens", int)),
        model=chat.get(body, "model", str, ""),
        stream=chat.get(body, "stream", bool, False),
        logprobs="message.output_text.logprobs" in chat.get(body, "include", list, []),
        token_ids=chat.get(body, "return_token_ids", bool, False),
        previous=previous,
        instructions=instructions,
    )


def _parse_item(item: Mapping[str, Any], messages: list[Message], names: dict[str, str]) -> None:
    """Append an item. Those of one turn of the model follow each other and become one message."""
    kind = chat.get(item, "type", str, "message")
    if kind == "function_call_output":
        call_id = chat.get(item, "call_id", str, "")
        output = chat.parse_text(item.get("output"), kind, _TEXT_PARTS)
        messages.append(Message("tool", output, name=names.get(call_id, ""), tool_call_id=call_id))
        return
    turn = Message("assistant")
    if kind == "function_call":
        call = chat.parse_call(item.get("name"), item.get("arguments"), item.get("call_id"))
        names[call.id] = call.name
        turn = replace(turn, tool_calls=(call,))
    elif kind == "reasoning":
        turn = replace(turn, thinking=chat.parse_text(item.get("content"), kind, ("reasoning_text",)))
    else:
        role = chat.get(item, "role", str, "")
        if kind != "message" or role not in _ROLES:
            raise ApiError(f"an item of type {kind!r:.40} and role {role!r:.40} is not supported")
        turn = Message(_ROLES[role], chat.parse_text(item.get("content"), role, _TEXT_PARTS))  # type: ignore[arg-type]
    if turn.role == "assistant" and messages and messages[-1].role == "assistant":
        last = messages.pop()
        calls, thinking = last.tool_calls + turn.tool_calls, last.thinking + turn.thinking
        turn = Message("assistant", last.text + turn.text, calls, thinking)
    messages.append(turn)


def format_reply(reply: ChatReply) -> dict[str, Any]:
    """The body of a response that is not streamed."""
    message = reply.message
    output: list[dict[str, Any]] = []
    if message.thinking:
        output.append(_reasoning(reply.request.id, message.thinking))
    if message.text or not message.tool_calls:
        output.append(_message(f"msg_{reply.request.id}", message.text))
    output += [_function_call(call) for call in message.tool_calls]
    return _format_response(reply, output)


class ResponsesStream:
    """Writes the events of a streamed response; every event has a number."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._number = -1
        self._output: list[dict[str, Any]] = []
        """Items that are complete."""
        self._open = ""
        """`thinking` or `content` while such an item is open."""
        self._text = ""

    def start(self) -> Iterator[dict[str, Any]]:
        response = _header(self._request, "in_progress")
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        kind, value = delta
        if kind != self._open:
            yield from self._close_item()
        position = {"output_index": len(self._output)}
        if isinstance(value, ToolCall):
            item = _function_call(value)
            added = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", item=added, **position)
            arguments = item["arguments"]
            named = {"item_id": item["id"], **position}
            yield self._event("response.function_call_arguments.delta", delta=arguments, **named)
            yield self._event("response.function_call_arguments.done", arguments=arguments, name=value.name, **named)
            yield self._event("response.output_item.done", item=item, **position)
            self._output.append(item)
            return
        if not self._open:
            self._open = kind
            item = self._item("")
            added = {**item, "content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", item=added, **position)
            added_part = {"part": item["content"][0], "content_index": 0, "item_id": item["id"], **position}
            yield self._event("response.content_part.added", **added_part)
        self._text += value
        name = "output_text" if kind == "content" else "reasoning_text"
        fields: dict[str, Any] = {"item_id": self._item("")["id"], "content_index": 0, **position}
        if kind == "content":
            fields["logprobs"] = []
        yield self._event(f"response.{name}.delta", delta=value, **fields)

    def finish(self, reply: ChatReply) -> Iterator[dict[str, Any]]:
        if not self._output and not self._open:
            yield from self.add(("content", ""))
        yield from self._close_item()
        response = _format_response(reply, self._output)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> Iterator[dict[str, Any]]:
        yield self._event("error", code=error.code, message=str(error), param=None)

    def _item(self, text: str) -> dict[str, Any]:
        if self._open == "thinking":
            return _reasoning(f"{self._request.id}_{len(self._output)}", text)
        return _message(f"msg_{self._request.id}_{len(self._output)}", text)

    def _close_item(self) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        item = self._item(self._text)
        position = {"output_index": len(self._output), "item_id": item["id"], "content_index": 0}
        name = "output_text" if self._open == "content" else "reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if self._open == "content" else {}
        yield self._event(f"response.{name}.done", text=self._text, **position, **extra)
        yield self._event("response.content_part.done", part=item["content"][0], **position)
        yield self._event("response.output_item.done", item=item, output_index=len(self._output))
        self._output.append(item)
        self._open = self._text = ""

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}


def _reasoning(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": "completed"}


def _message(name: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": name, "role": "assistant", "status": "completed", "content": content}


def _function_call(call: ToolCall) -> dict[str, Any]:
    arguments = chat.dump_arguments(call)
    fields = {"name": call.name, "arguments": arguments, "call_id": call.id, "status": "completed"}
    return {"type": "function_call", "id": f"fc_{call.id}", **fields}


def _header(request: ChatRequest, status: str) -> dict[str, Any]:
    return {
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": request.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions or None,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": request.previous or None,
        "temperature": request.sampling.temperature,
        "tool_choice": "auto",
        "tools": [{"strict": False, "type": "function", **tool["function"]} for tool in request.tools],
        "top_p": request.sampling.top_p,
    }


def _format_response(reply: ChatReply, output: list[dict[str, Any]]) -> dict[str, Any]:
    """A finished response; `incomplete` if the turn was cut at its token limit.

    The log-probabilities of the whole turn are those of its first message; a turn of calls alone has none to hold them.
    """
    cut = reply.finish == "length"
    prompt, sampled = len(reply.prompt), len(reply.completion.token_ids)
    out = _header(reply.request, "incomplete" if cut else "completed")
    out["output"] = output
    out["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
    out["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
    if reply.request.logprobs:
        for item in [item for item in output if item["type"] == "message"][:1]:
            item["content"][0]["logprobs"] = chat.format_logprobs(reply.completion, reply.template)
    if reply.request.token_ids:
        out["token_ids"] = [int(token) for token in reply.completion.token_ids]
        out["prompt_token_ids"] = list(reply.prompt)
    return out
