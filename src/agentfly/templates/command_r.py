"""Cohere's Command R."""

from __future__ import annotations

from agentfly.templates.family import Family

FAMILIES = (
    Family(
        name="command-r",
        needs=("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        close=("<|END_OF_TURN_TOKEN|>",),
        reader="command-r",
        aliases=("command-r-plus", "command-a", "cohere"),
    ),
)
