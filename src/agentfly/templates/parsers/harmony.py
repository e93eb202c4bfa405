"""Parser for gpt-oss (harmony): a turn is several messages, each on a channel.

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>
    <|start|>assistant<|channel|>final<|message|>…<|return|>

`analysis` is thinking; `final`, and `commentary` without a recipient, is content; a message with a recipient is a call,
on any channel. The recipient follows the role or the channel. The prompt ends with `<|start|>assistant`, so the first
header has no role. A message without a channel is content and a problem.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agentfly.templates.parsers.calls import add_problem, parse_named_call
from agentfly.templates.parsers.turn import make_reply
from agentfly.types import MAX_CALLS, Message, Reply, ToolCall

_EXAMPLE = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>"
_BOUNDARY = re.compile(r"<\|(?:(?:end|call|return)()|start|channel)\|>")
_HEADER = re.compile(
    r"\s*+(?:(?:<\|start\|>)?assistant)?+\s*+(?:to=([^\s<]++))?+\s*+(?:<\|channel\|>\s*+(\w*+))?+"
    r"\s*+(?:to=([^\s<]++))?+\s*+(?:<\|constrain\|>\s*+\w*+|json|code)?+\s*+"
)


def parse_harmony(text: str) -> Reply:
    """Parse the messages of one turn."""
    if "<|" not in text:
        return Reply(Message("assistant", text))
    content: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    problems: list[str] = []
    header, *bodies = text.split("<|message|>")
    for number, body in enumerate(bodies):
        if len(calls) > MAX_CALLS:
            problems.append(f"there are more than {MAX_CALLS} calls; what follows them was not read")
            content.append("<|message|>".join([header, *bodies[number:]]))
            header = ""
            break
        end = _BOUNDARY.search(body)
        message = body[: end.start()] if end else body
        header_match = _HEADER.fullmatch(header)
        recipient, channel = (header_match[1] or header_match[3], header_match[2]) if header_match else (None, None)
        if recipient and recipient != "assistant":
            call = parse_named_call(recipient.removeprefix("functions."), message)
            calls.append(replace(add_problem(call, f"write {_EXAMPLE}"), raw=message) if call.problem else call)
        elif channel == "analysis":
            thinking.append(message)
        elif channel in ("final", "commentary"):
            content.append(message)
        else:
            content += [header, message]
            problems.append(f"the header {header[:60]!r} names none of the channels analysis, commentary, final")
        # `lastindex` is set for markers that close a message; the others begin the next header.
        header = body[end.end() if end.lastindex else end.start() :] if end else ""
        if end and not end.lastindex:
            problems.append("a message is not closed; write <|end|> after it")
    if header.strip():
        content.append(header)
        if "<|" in header:
            problems.append(f"the header {header[:60]!r} is not followed by <|message|>")
    return make_reply(content, thinking, calls, problems)
