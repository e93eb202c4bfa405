"""Rewards of the shell environment: compare files and output with those of the gold command."""

from __future__ import annotations

from typing import Any

from agentfly.environments.shell import Shell
from agentfly.scoring import reward


@reward
async def shell_match(prediction: str, env: Shell) -> dict[str, Any]:
    """1 if the files and the output equal those of the gold command, otherwise 0."""
    scores = await env.evaluate(prediction)
    return {"reward": float(scores.pop("match")), **scores}


@reward
async def shell_similarity(prediction: str, env: Shell) -> dict[str, Any]:
    """Mean similarity of changed paths, contents and output, as in InterCode."""
    scores = await env.evaluate(prediction)
    return {"reward": scores["similarity"], **scores}
