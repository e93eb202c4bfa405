"""gpt-oss (harmony): a turn is several messages, each on a channel.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

`analysis` is thinking; `final`, and `commentary` to nobody, is content; a message to somebody is a call, on
any channel. The recipient stands after the role or after the channel. The prompt wrote `<|start|>assistant`,
so the first header begins without it. A message without a channel is content, and a problem.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agentfly.templates.readers.calls import named_call, with_problem
from agentfly.templates.readers.turn import joined
from agentfly.types import MAX_CALLS, Message, Reply, ToolCall

_EXAMPLE = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>"
_BOUNDARY = re.compile(r"<\|(?:(?:end|call|return)()|start|channel)\|>")
_HEADER = re.compile(
    r"\s*+(?:(?:<\|start\|>)?assistant)?+\s*+(?:to=([^\s<]++))?+\s*+(?:<\|channel\|>\s*+(\w*+))?+"
    r"\s*+(?:to=([^\s<]++))?+\s*+(?:<\|constrain\|>\s*+\w*+|json|code)?+\s*+"
)


class _Reading:
    """What has been read of a turn so far."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.thinking: list[str] = []
        self.calls: list[ToolCall] = []
        self.problems: list[str] = []

    def add(self, header: str, body: str) -> None:
        """Take in one message."""
        found = _HEADER.fullmatch(header)
        recipient, channel = (found[1] or found[3], found[2]) if found else (None, None)
        if recipient and recipient != "assistant":
            self.calls.append(_call(recipient.removeprefix("functions."), body))
        elif channel == "analysis":
            self.thinking.append(body)
        elif channel in ("final", "commentary"):
            self.content.append(body)
        else:
            self.content += [header, body]
            channels = "the channels analysis, commentary, final"
            self.problems.append(f"the header {header[:60]!r} names none of {channels}")

    def reply(self) -> Reply:
        message = Message("assistant", joined(self.content), tuple(self.calls), joined(self.thinking))
        return Reply(message, None, tuple(dict.fromkeys(self.problems)))


def _call(name: str, body: str) -> ToolCall:
    call = named_call(name, body)
    return replace(with_problem(call, f"write {_EXAMPLE}"), raw=body) if call.problem else call


def read(text: str) -> Reply:
    """Read the messages of one turn."""
    if "<|" not in text:
        return Reply(Message("assistant", text))
    reading = _Reading()
    header, *bodies = text.split("<|message|>")
    for number, body in enumerate(bodies):
        if len(reading.calls) > MAX_CALLS:
            reading.problems.append(f"there are more than {MAX_CALLS} calls; what follows them was not read")
            reading.content.append("<|message|>".join([header, *bodies[number:]]))
            header = ""
            break
        end = _BOUNDARY.search(body)
        reading.add(header, body[: end.start()] if end else body)
        header = body[end.end() if end.lastindex else end.start() :] if end else ""
        if end and not end.lastindex:
            reading.problems.append("a message is not closed; write <|end|> after it")
    if header.strip():
        reading.content.append(header)
        if "<|" in header:
            reading.problems.append(f"the header {header[:60]!r} is not followed by <|message|>")
    return reading.reply()
