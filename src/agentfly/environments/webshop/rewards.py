"""The reward of the web shop."""

from __future__ import annotations

from typing import Any

from agentfly.environments.webshop.environment import WebShop
from agentfly.scoring import reward


@reward
def webshop_reward(env: WebShop) -> dict[str, Any]:
    """Score of the purchase, 0 to 1; 0 without a purchase.

    Metrics: `success` (the score is 1), `bought`, and the parts of the score: `r_type`, `r_attributes`, `r_options`,
    `r_price`.
    """
    score = env.score
    if score is None:
        return {"reward": 0.0, "success": 0.0, "bought": 0.0}
    parts = {f"r_{name}": value for name, value in score.items() if name != "reward"}
    return {"reward": score["reward"], "success": float(score["reward"] == 1.0), "bought": 1.0, **parts}
