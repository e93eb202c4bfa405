"""Rewards for the shell: whether files and output are what the right command makes of them."""

from __future__ import annotations

from typing import Any

from agentfly.environments.shell import Shell
from agentfly.scoring import reward


@reward
async def shell_match(prediction: str, env: Shell) -> dict[str, Any]:
    """One where the files are as they should be and the right thing was printed, else zero."""
    found = await env.judged(prediction)
    return {"reward": float(found.pop("match")), **found}


@reward
async def shell_similarity(prediction: str, env: Shell) -> dict[str, Any]:
    """How near files and output are to the right ones, in thirds, as InterCode counts it."""
    found = await env.judged(prediction)
    return {"reward": found["similarity"], **found}
