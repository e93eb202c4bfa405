"""smolagents sends the calls of an earlier turn as text: the turn's own text, then its calls with ids and arguments."""

from __future__ import annotations

import json

from agentfly.types import Message


def restates_calls(sent: Message | None, text: str) -> bool:
    """Whether a text is a turn with calls as smolagents writes it."""
    if sent is None or not sent.tool_calls or not text.startswith(start := sent.text.strip()):
        return False
    calls_text = text[len(start) :]
    return all(
        call.id in calls_text
        and call.name in calls_text
        and all(repr(value) in calls_text or json.dumps(value) in calls_text for value in call.arguments.values())
        for call in sent.tool_calls
    )
