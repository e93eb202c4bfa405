"""Rewards for SQL: whether a query gives what the right one gives, on a database that the model never touched."""

from __future__ import annotations

from typing import Any

from agentfly.environments.sql import SQL
from agentfly.scoring import reward


@reward
async def sql_match(prediction: str, env: SQL) -> dict[str, Any]:
    """One where the result of the submitted query is the right one, else zero."""
    found = await env.judged(prediction)
    return {"reward": float(found.pop("match")), **found}


@reward
async def sql_iou(prediction: str, env: SQL) -> dict[str, Any]:
    """The part of the rows that is right, as InterCode counts it: those in both results over those in either."""
    found = await env.judged(prediction)
    return {"reward": found["iou"], **found}
