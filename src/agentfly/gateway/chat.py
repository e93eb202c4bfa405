"""One turn as all APIs of the gateway have it: `ChatRequest` in, `ChatReply` out, `Delta`s in between.

`client_message` is the reply as a client sees it and sends it back in its next request: valid calls with ids, and the
text of calls that could not be parsed as content. What a client sends back is compared with it, in any API.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from typing import Any, TypeVar

from agentfly import threads
from agentfly.backends.http_body import BodyError, parse_json
from agentfly.errors import ConfigError, DataError
from agentfly.templates.template import Template
from agentfly.tooling.schema import convert_text
from agentfly.types import Completion, FinishReason, Message, Reply, Sampling, ToolCall

Result = TypeVar("Result")
_LARGE = 1 << 17
"""Characters above which a request is parsed and rendered in a thread, so that other clients are not blocked."""
_MESSAGE_COST = 200
"""Characters that take as long to render as a message itself."""
_ONE_LARGE = threading.Lock()
_ID_PREFIX = secrets.token_hex(4)
_ID_NUMBERS = count(1)
_UNSUPPORTED = {
    "n": (None, 1),
    "best_of": (None, 1),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "echo": (None, False),
}
"""Fields of requests that change what is sampled and that no backend supports, with the values that change nothing."""
_PENALTIES = ("presence_penalty", "frequency_penalty")
_TYPES: dict[type, str] = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip


class ApiError(Exception):
    """A request is answered with an error. The message is shown to the client."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one turn."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas in OpenAI format."""
    sampling: Sampling = field(default_factory=Sampling)
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    """Chat Completions: end the stream with the token counts."""
    logprobs: bool = False
    token_ids: bool = False
    """Return the ids of prompt and reply, as vLLM does."""
    previous: str = ""
    """Responses API: the id of the response that this request continues."""
    instructions: str = ""
    """Responses API: the system prompt of this request, which is also the first of `messages` unless `previous`."""
    prompt_ids: Sequence[int] = ()
    """/completions: the prompt, instead of messages."""
    stop_ids: frozenset[int] | None = None
    """/completions: tokens that end the turn; None: those of the template."""
    id: str = field(default_factory=lambda: f"{_ID_PREFIX}{next(_ID_NUMBERS):08x}")
    """Of the reply, without the prefix of an API."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A sampled turn."""

    message: Message
    """As the client sees it."""
    completion: Completion
    prompt: Sequence[int]
    request: ChatRequest
    template: Template

    @property
    def finish(self) -> str:
        """`tool_calls`, `stop` or `length`, as in Chat Completions."""
        if self.message.tool_calls:
            return "tool_calls"
        return "length" if self.completion.finish is FinishReason.LENGTH else "stop"


Delta = tuple[str, str | ToolCall]
"""`("thinking", text)`, `("content", text)` or `("call", call)`: what a stream adds to the reply."""


def client_message(reply: Reply, reply_id: str, tools: Sequence[Mapping[str, Any]]) -> Message:
    """The message of a reply as clients see it. The schemas of the tools decide the types of arguments."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls: list[ToolCall] = []
    texts = [reply.message.text.strip("\n")]
    for call in reply.calls:
        if call.problem:
            texts.append(call.raw.strip("\n"))
        else:
            arguments = convert_text(call.arguments, schemas.get(call.name, {}))
            calls.append(replace(call, id=f"call_{reply_id}_{len(calls)}", arguments=arguments))
    content = "\n".join(text for text in texts if text)
    return Message("assistant", content, tuple(calls), reply.message.thinking.strip("\n"))


def dump_arguments(call: ToolCall) -> str:
    """The arguments of a call as JSON text."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


# ── parts of requests that several APIs share ──

ParseItem = Callable[[Mapping[str, Any], list[Message], dict[str, str]], None]
"""Appends an item of a request to the messages. The dict has the tools of earlier calls by the ids of the calls."""


def parse_body(data: bytes | bytearray) -> dict[str, Any]:
    """Parse a body. Raises ApiError if it is not a JSON object."""
    try:
        value = parse_json(data)
    except BodyError as error:
        raise ApiError(str(error)) from None
    if not isinstance(value, dict):
        raise ApiError(f"a request is a JSON object, not {value!r:.80}")
    return value


async def run_unblocked(size: int, function: Callable[..., Result], /, *args: Any) -> Result:
    """Call a function; in a thread if its input is large. `size`: in characters.

    One such function runs at a time: each takes as much of the interpreter from the event loop as the loop has left.
    """
    if size <= _LARGE:
        return function(*args)

    def run() -> Result:
        with _ONE_LARGE:
            return function(*args)

    result: Result = await threads.call(run)
    return result


def rendering_size(messages: Sequence[Message]) -> int:
    """The size of a conversation in characters, in terms of the time that rendering it takes."""
    return sum(len(message.text) + _MESSAGE_COST for message in messages)


def parse_messages(
    items: Sequence[Mapping[str, Any]], parse_item: ParseItem, *, system: str = "", check_results: bool = True
) -> tuple[Message, ...]:
    """Convert the messages of a body. Raises ApiError, also for a conversation that no template can continue.

    `system`: the system message of an API that has it outside of the messages. `check_results`: whether every tool
    result must belong to a call of an earlier item.
    """
    messages: list[Message] = []
    names: dict[str, str] = {}
    for item in items:
        parse_item(item, messages, names)
    for message in messages:
        check_text(message.text + message.thinking + message.tool_call_id)
        for call in message.tool_calls:
            check_json([call.name, call.id, call.raw, dict(call.arguments)], "a call")
        if check_results and message.role == "tool":
            require_call(message.tool_call_id, names)
    if system:
        messages.insert(0, Message("system", system))
    if not messages:
        raise ApiError("there are no messages")
    if messages[-1].role == "assistant":
        raise ApiError(
            "the last message is the assistant's; a request must end with another one (no prefilled replies)"
        )
    return tuple(messages)


def require_call(call_id: str, names: Mapping[str, str]) -> str:
    """The tool of a call. Raises ApiError if there is no such call."""
    if call_id not in names:
        raise ApiError(f"a tool result is for the call {call_id!r:.80}, which no earlier message has")
    return names[call_id]


def order_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The conversation with the results of each turn in the order of its calls.

    Most templates write results without ids, so that the model would read a result in another position as the result
    of another call.
    """
    numbers = count()
    positions: dict[str, int] = {}
    ordered: list[Message] = []
    for role, run in groupby(messages, key=lambda message: message.role):
        group = list(run)
        if role == "assistant":
            positions.update({call.id: next(numbers) for message in group for call in message.tool_calls})
        if role == "tool":
            group.sort(key=lambda message: positions.get(message.tool_call_id, -1))
        ordered += group
    return tuple(ordered)


def get(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """The value of a field, or `default` if it is absent or null. Raises ApiError if it is of another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kind_names = " or ".join(_TYPES[type_] for type_ in (kind if isinstance(kind, tuple) else (kind,)))
        raise ApiError(f"{name!r} must be {kind_names}, not {value!r:.80}")
    return check_text(value) if isinstance(value, str) else value


def check_text(value: str) -> str:
    """Return a text that has a UTF-8 encoding. Raises ApiError for half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"a text holds half of a surrogate pair at character {error.start}") from None
    return value


def get_list(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The objects of a list field; empty if it is absent. Raises ApiError for anything else."""
    values: list[Any] = get(body, name, list, [])
    if not set(map(type, values)) <= {dict}:  # without a loop in Python: a conversation may be long
        value = next(value for value in values if not isinstance(value, dict))
        raise ApiError(f"{name!r} must be a list of objects, not of {value!r:.80}")
    return values


def parse_text(value: Any, what: str, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a content: a string, null, or a list of text parts. Raises ApiError for an image."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ApiError(f"{what}: the content must be text or a list of parts, not {value!r:.80}")
    texts = []
    for block in value:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in kinds or not isinstance(block.get("text"), str):
            raise ApiError(
                f"{what}: a part must be text ({', '.join(kinds)}), not {block!r:.80}; images are not supported"
            )
        texts.append(block["text"])
    return "".join(texts)


def parse_sampling(body: Mapping[str, Any], max_tokens: int | None) -> Sampling:
    """The sampling fields of a request, by the names that OpenAI and vLLM share. Raises ApiError."""
    for name, harmless in _UNSUPPORTED.items():
        if body.get(name) not in harmless:
            raise ApiError(f"{name!r} is not supported")
    for name in _PENALTIES:
        if get(body, name, (int, float), 0):
            raise ApiError(f"{name!r} is not supported; use repetition_penalty")
    fields: dict[str, Any] = {"max_tokens": max_tokens}
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if (number := get(body, name, (int, float))) is not None:
            fields[name] = number
    if (top_k := get(body, "top_k", int)) is not None:
        fields["top_k"] = max(top_k, 0)  # -1 means off
    if (seed := get(body, "seed", int)) is not None:
        fields["seed"] = seed
    stop = body.get("stop", body.get("stop_sequences"))
    # Anthropic's API calls the field stop_sequences.
    stop = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stop, list) or len(stop) > 64 or not all(isinstance(text, str) and text for text in stop):
        raise ApiError(f"'stop' must be a text or a list of at most 64 texts, not {stop!r:.80}")
    try:
        return Sampling(**fields, stop=tuple(stop))
    except ConfigError as error:
        raise ApiError(str(error)) from None


def parse_schema(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool in OpenAI format, from its parts as a request has them."""
    if not isinstance(name, str) or not name:
        raise ApiError(f"a tool needs a name, not {name!r:.80}")
    if not isinstance(parameters, Mapping | None) or not isinstance(description, str | None):
        raise ApiError(f"tool {name!r}: its parameters must be a JSON schema and its description text")
    function = {
        "name": name,
        "description": description or "",
        "parameters": {"type": "object", "properties": {}, **(parameters or {})},
    }
    check_json(function, f"tool {name!r}")
    return {"type": "function", "function": function}


def check_json(value: Any, what: str) -> None:
    """Raise ApiError for a value that JSON cannot keep: NaN, infinity, half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"{what} cannot be stored: {error}") from None


def parse_call(name: Any, arguments: Any, call_id: Any) -> ToolCall:
    """A call of an earlier turn. Arguments are an object or JSON text."""
    try:
        return ToolCall.of({"id": call_id, "function": {"name": name, "arguments": arguments}})
    except DataError as error:
        raise ApiError(str(error)) from None


def format_logprobs(completion: Completion, template: Template) -> list[dict[str, Any]]:
    """The sampled tokens with their log-probabilities, as OpenAI's APIs have them."""
    out = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = template.codec.decode([token])
        out.append({"token": text, "logprob": float(logprob), "bytes": list(text.encode()), "top_logprobs": []})
    return out
