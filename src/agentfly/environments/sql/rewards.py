"""Rewards of the SQL environment: compare the result of a query with that of the gold query on fresh databases."""

from __future__ import annotations

from typing import Any

from agentfly.environments.sql import SQL
from agentfly.scoring import reward


@reward
async def sql_match(prediction: str, env: SQL) -> dict[str, Any]:
    """1 if the result of the submitted query equals that of the gold query, otherwise 0."""
    scores = await env.evaluate(prediction)
    return {"reward": float(scores.pop("match")), **scores}


@reward
async def sql_iou(prediction: str, env: SQL) -> dict[str, Any]:
    """Intersection over union of the rows of both results, as in InterCode."""
    scores = await env.evaluate(prediction)
    return {"reward": scores["iou"], **scores}
