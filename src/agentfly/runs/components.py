"""What a reward is made of: the figures that it reports, and how much of its spread each of them explains.

A reward may report any figures beside its total. Those of which the total is a weighted sum are its components; they
are found by least squares over the chains of a step, so the weights need not be known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentfly.trajectory import Trajectory

MOST = 16
"""Components looked for at once; a reward that reports more figures is not taken apart."""
_TINY, _HUGE = 1e-6, 1e100


def component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of every number that the reward reported beside its total."""
    seen: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in reported(trajectory).items():
            seen.setdefault(name, []).append(value)
    return {f"score/{name}": sum(values) / len(values) for name, values in seen.items()}


def component_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How much of the reward's variance each component explains; empty where fewer than two of them vary."""
    scored = [t for t in trajectories if t.score is not None]
    numbers = [reported(t) for t in scored]
    names = sorted(set.intersection(*map(set, numbers))) if numbers else []
    if not 2 <= len(names) <= MOST or len(scored) <= len(names) + 1:
        return {}
    figures = np.array([[each[name] for name in names] for each in numbers], np.float64)
    rewards = np.array([t.reward for t in scored], np.float64)
    if np.abs(rewards).max() > _HUGE or rewards.std() < _TINY:
        return {}
    spread = figures.std(axis=0)
    moving = spread > _TINY
    centred = (figures - figures.mean(axis=0))[:, moving] / spread[moving]
    target = (rewards - rewards.mean()) / rewards.std()
    weights, *_ = np.linalg.lstsq(centred, target, rcond=None)
    found = np.abs(weights) > 1e-3
    if np.abs(centred @ weights - target).max() > 1e-3 or found.sum() < 2:
        return {}  # the total is no weighted sum of them, or it is one of them
    parts = weights[found] ** 2
    chosen = np.array(names)[moving][found]
    return {f"reward_share/{name}": float(part / parts.sum()) for name, part in zip(chosen, parts, strict=True)}


def reported(trajectory: Trajectory) -> dict[str, float]:
    """The numbers that a reward reported; those whose square no float can hold are left out."""
    metrics = {} if trajectory.score is None else trajectory.score.metrics
    return {n: float(v) for n, v in metrics.items() if isinstance(v, int | float) and abs(v) < _HUGE}
