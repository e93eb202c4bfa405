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
    functionary,
    gemma,
    gemma4,
    glm,
    harmony,
    hermes,
    invoke,
    json_blocks,
    kimi,
    lfm2,
    llama_json,
    llama_pythonic,
    minimax_m3,
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
    "gemma-4": gemma4.read,
    "deepseek-dsml": invoke.read_dsml,
    "kimi-k2": kimi.read_k2,
    "kimi-k3": kimi.read_k3,
    "minimax-m2": invoke.read_minimax,
    "minimax-m3": minimax_m3.read,
    "lfm2": lfm2.read,
    "nemotron-v2": json_blocks.read_nemotron,
    "apertus": json_blocks.read_apertus,
    "apriel": json_blocks.read_apriel,
    "gigachat": json_blocks.read_gigachat,
    "minicpm": invoke.read_minicpm,
    "muse": invoke.read_muse,
    "functionary-v3.1": functionary.read_v31,
    "functionary-v3.2": functionary.read_v32,
}
