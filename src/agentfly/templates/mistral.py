"""Mistral: no roles, a system text that moves to the last user turn, and calls with ids of nine letters or digits."""

from __future__ import annotations

from agentfly.templates.family import Family

FAMILIES = (
    Family(
        name="mistral",
        needs=("[INST]", "[/INST]"),
        close=("</s>",),
        reader="mistral",
        image="[IMG]",
        aliases=("mistral-nemo", "mistral-small", "ministral", "mixtral", "pixtral"),
    ),
)
