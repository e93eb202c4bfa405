"""Readers: each takes the text of one assistant turn and says what is in it.

The text is decoded with its control tokens kept, without the token that closed the turn. Where the prompt already
opened the model's thinking, the text begins with that opening, so that a turn always reads whole. A reader never
raises and never loses text; what it could not read, it says in words for the model (`ToolCall.problem`,
`Reply.problems`), with the right form beside it.
"""

from __future__ import annotations

from agentfly.template import Reader
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

__all__ = ["READERS", "Reader"]


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
