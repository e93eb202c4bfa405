"""The growing text of a turn as deltas of thinking, content and complete calls.

Invariant: the deltas together are the message that the whole turn is parsed to. So text is held back while it could
still become a marker, a call or a stop string, and a call is sent when it is complete. The turn is parsed again only
when it has grown by an eighth, which keeps the whole time linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agentfly.gateway.chat import Delta, client_message
from agentfly.templates.template import Template
from agentfly.types import Message, Reply

_SUSPICIOUS = "<[{"
"""Characters that the markers and calls of all formats begin with."""
_LONGEST_MARKER = 40


class ReplyStream:
    """Converts the text of one turn to deltas."""

    def __init__(self, template: Template, reply_id: str, stops: tuple[str, ...]) -> None:
        self._template = template
        self._id = reply_id
        self._stops = stops
        self._hold = max(map(len, stops), default=0)
        self._sent = Message("assistant")
        self._parsed = 0
        """Length of the text that was last parsed."""

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def add(self, text: str) -> Iterator[Delta]:
        """The deltas that are certain, given all text of the turn so far."""
        text = text[: len(text) - self._hold] if self._hold else text
        if not any(map(text.__contains__, _SUSPICIOUS)):
            yield from self.advance(Message("assistant", text.strip("\n").rstrip()))
            return
        if len(text) < self._parsed + self._parsed // 8 + 16:
            return
        self._parsed = len(text)
        reply = self._template.parse_text(text)
        message = reply.message
        calls = []
        for call in message.tool_calls:
            if call.problem:
                break
            calls.append(call)
        content = message.text.strip("\n")
        if self._template.tools:
            content = content[
                : min([at for mark in _SUSPICIOUS if (at := content.find(mark)) >= 0], default=len(content))
            ]
            if calls:
                content = ""  # text after a call is sent at the end
        sure = replace(message, content=self._stable(content), tool_calls=tuple(calls))
        thinking = message.thinking.strip("\n")
        if not message.text and not calls:  # it may not be complete
            thinking = self._stable(thinking)
        sent = client_message(Reply(sure), self._id, self._template.tools)
        yield from self.advance(replace(sent, thinking=thinking))

    def _stable(self, text: str) -> str:
        """The text without an end that could be the beginning of a marker or that parsing strips."""
        tail = max(len(text) - _LONGEST_MARKER, 0)
        starts = [at for mark in _SUSPICIOUS if (at := text.find(mark, tail)) >= 0]
        return text[: min(starts, default=len(text))].rstrip()

    def advance(self, message: Message) -> Iterator[Delta]:
        """What a message, or the beginning of one, adds to the deltas so far; at the end, given the whole message."""
        sent = self._sent
        # Clients append deltas in order: thinking that came after content or a call would end up inside of them.
        if len(message.thinking) > len(sent.thinking) and not sent.content and not sent.tool_calls:
            yield "thinking", message.thinking[len(sent.thinking) :]
            sent = replace(sent, thinking=message.thinking)
        if len(message.text) > len(sent.text):
            yield "content", message.text[len(sent.text) :]
            sent = replace(sent, content=message.content)
        if len(message.tool_calls) > len(sent.tool_calls):
            for call in message.tool_calls[len(sent.tool_calls) :]:
                yield "call", call
            sent = replace(sent, tool_calls=message.tool_calls)
        self._sent = sent
