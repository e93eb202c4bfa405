"""Readers: each takes the text of one assistant turn and says what is in it.

The text is decoded with its control tokens kept, without the token that closed the turn. A reader never
raises and never loses text; what it could not read, it says in words for the model (`ToolCall.problem`,
`Reply.problems`), with the right form beside it.
"""

from __future__ import annotations

from typing import Protocol

from agentfly.templates.readers import (
    command_r,
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    llama_json,
    llama_pythonic,
    mistral,
    plain,
    qwen_xml,
)
from agentfly.types import Reply

__all__ = ["READERS", "Reader"]


class Reader(Protocol):
    """Reads one assistant turn."""

    def __call__(self, text: str, *, thinking_open: bool = False) -> Reply:
        """`thinking_open`: the prompt wrote the opening of the thinking block; the text begins inside."""
        ...


READERS: dict[str, Reader] = {
    "plain": plain.read,
    "hermes": hermes.read,
    "qwen-xml": qwen_xml.read,
    "llama-json": llama_json.read,
    "llama-pythonic": llama_pythonic.read,
    "mistral": mistral.read,
    "deepseek": deepseek.read,
    "glm": glm.read,
    "harmony": harmony.read,
    "command-r": command_r.read,
    "gemma": gemma.read,
}
