"""Plain turns: all of it is content.

Only where the prompt opened a thinking block is the thinking set apart.
"""

from __future__ import annotations

from agentfly.templates.readers.turn import Turn
from agentfly.types import Message, Reply

_THINKING = Turn()


def read(text: str, *, thinking_open: bool = False) -> Reply:
    """Read a turn without any call format."""
    return _THINKING(text, thinking_open=True) if thinking_open else Reply(Message("assistant", text))
