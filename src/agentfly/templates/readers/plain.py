"""Plain turns: all of it is content, but for a block of thinking at its beginning."""

from __future__ import annotations

from agentfly.templates.readers.turn import THINK, Turn
from agentfly.types import Message, Reply

_THINKING = Turn()


def read(text: str) -> Reply:
    """Read a turn without any call format."""
    return _THINKING(text) if text.lstrip().startswith(THINK[0]) else Reply(Message("assistant", text))
