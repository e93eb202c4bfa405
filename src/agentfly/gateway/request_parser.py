"""Parses the requests of one session. Messages that a request has in common with an earlier one are not parsed again.

A client sends the whole conversation with every request, so that parsing it would take longer from turn to turn. If a
body begins with the bytes of an earlier one up to the end of its messages, those messages are cut out before the JSON
is parsed, and the objects of the earlier request replace them. Any other body is parsed as a whole.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.gateway.chat import ApiError, check_json, check_text
from agentfly.http_body import BodyError, parse_json
from agentfly.types import Message

ParseItem = Callable[[Mapping[str, Any], list[Message], dict[str, str]], None]
"""Appends an item of a request to the messages. The dict has the tools of earlier calls by the ids of the calls."""
MAX_PREFIX = 4 << 20
"""Maximum number of bytes of a body that are remembered."""
_MARK = secrets.token_hex(16)
"""Replaces the known messages of a body while it is parsed; clients cannot guess it."""
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, eq=False)
class _Conversation:
    """A request that was parsed."""

    prefix: bytearray
    """The beginning of its body up to the end of its last message; empty if it is not remembered."""
    start: int
    """Where the first message begins in `prefix`."""
    parse_item: ParseItem
    items: list[Any]
    messages: list[Message]
    names: dict[str, str]


class RequestParser:
    """Parses the bodies of requests and the messages in them."""

    def __init__(self, remembered: int = 8) -> None:
        """`remembered`: number of conversations that are kept; 0 parses every request as a whole."""
        self._conversations: deque[_Conversation] = deque(maxlen=remembered)
        self._last: tuple[Any, bytearray, int] = (None, bytearray(), 0)
        """Of the body that was read last: its messages, and prefix and start as in `_Conversation`."""

    def read(self, data: bytearray, name: str) -> dict[str, Any]:
        """Parse a body, whose field `name` has the messages. Raises ApiError if it is not a JSON object.

        The body is cut after its last message and kept: a copy of a long one would cost more than parsing what is new.
        """
        for known in self._conversations:
            start, length = known.start, len(known.prefix)
            if not length or data[length : length + 1] != b"," or not data.startswith(known.prefix):
                continue
            cut = data[:start] + f'"{_MARK}"'.encode() + data[length:]
            body = parse_body(cut)
            items = body.get(name)
            if isinstance(items, list) and items[:1] == [_MARK]:  # not if the field occurs twice
                items[:1] = known.items
                del data[_find_end(cut, start) + len(data) - len(cut) :]
                self._last = (items, data, start)
                return body
        body = parse_body(data)
        items = body.get(name)
        start = 0
        if self._conversations.maxlen and isinstance(items, list) and len(data) <= MAX_PREFIX:
            start = _find_start(data, name)
        del data[_find_end(data, start) if start else 0 :]
        self._last = (items, data, start)
        return body

    def parse(self, items: list[Any], parse_item: ParseItem, *, check_results: bool = True) -> list[Message]:
        """Convert the messages of a body. Raises ApiError.

        `check_results`: whether every tool result must belong to a call of an earlier item.
        """
        matching = [
            each
            for each in self._conversations
            if each.parse_item is parse_item and each.items == items[: len(each.items)]
        ]
        known = max(matching, key=lambda each: len(each.items), default=None)
        messages, names, num_items = ([], {}, 0) if known is None else (known.messages, known.names, len(known.items))
        messages, names, num_known = messages.copy(), names.copy(), len(messages)
        for item in items[num_items:]:
            parse_item(item, messages, names)
        for message in messages[num_known:]:
            check_text(message.text + message.thinking + message.tool_call_id)
            for call in message.tool_calls:
                check_json([call.name, call.id, call.raw, dict(call.arguments)], "a call")
            if check_results and message.role == "tool":
                require_call(message.tool_call_id, names)
        if known is not None:
            self._conversations.remove(known)
        read, prefix, start = self._last
        if read is not items:
            prefix, start = bytearray(), 0
        self._conversations.append(_Conversation(prefix, start, parse_item, items, messages, names))
        return messages.copy()


def require_call(call_id: str, names: Mapping[str, str]) -> str:
    """The tool of a call. Raises ApiError if there is no such call."""
    if call_id not in names:
        raise ApiError(f"a tool result is for the call {call_id!r:.80}, which no earlier message has")
    return names[call_id]


def parse_body(data: bytes | bytearray) -> dict[str, Any]:
    """Parse a body. Raises ApiError if it is not a JSON object."""
    try:
        value = parse_json(data)
    except BodyError as error:
        raise ApiError(str(error)) from None
    if not isinstance(value, dict):
        raise ApiError(f"a request is a JSON object, not {value!r:.80}")
    return value


def _find_start(data: bytes | bytearray, name: str) -> int:
    """Where the first element of the list in a field of a JSON object begins; 0 if that is not certain."""
    key = json.dumps(name).encode()
    at = data.find(key)
    rest = data[at + len(key) : at + len(key) + 8].replace(b" ", b"")
    if at < 0 or not rest.startswith(b":["):
        return 0
    try:  # only a field of the outermost object can be replaced by this
        parse_json(data[:at] + b'"x":0}')
    except BodyError:
        return 0
    return data.index(b"[", at) + 1


def _find_end(data: bytes | bytearray, start: int) -> int:
    """Where the last element of a list ends. `start`: where its first element begins."""
    text = data[start - 1 :].decode()
    _, end = _DECODER.raw_decode(text)
    return start - 1 + len(text[: end - 1].rstrip().encode())
