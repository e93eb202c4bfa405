"""Metrics of finished chains: pure functions of trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from agentfly.segment import Author
from agentfly.trajectory import CallStatus, FailureKind, TrainingTreatment, Trajectory

MAX_COMPONENTS = 16
"""A reward that reports more numbers is not decomposed."""
_MIN_STD = 1e-6
_MAX_VALUE = 1e100


def chain_metrics(trajectories: Sequence[Trajectory], version: int | None = None) -> dict[str, float]:
    """Metrics of chains by name; with the weight `version` that is being trained, also their staleness."""
    count = max(len(trajectories), 1)
    out: dict[str, float] = {"chains": float(len(trajectories))}

    # Rewards.
    rewards = np.array([t.reward for t in trajectories if t.reward is not None])
    out["reward/unscored"] = _mean(t.reward is None for t in trajectories)
    out["treatment/lost"] = _mean(not _counts_in_group(t) for t in trajectories)
    if len(rewards):
        for name in ("mean", "std", "min", "max"):
            out[f"reward/{name}"] = float(getattr(rewards, name)())
        if set(rewards) <= {0.0, 1.0}:
            out["reward/success"] = out["reward/mean"]

    # Lengths. Tokens are counted by author and divided by the number of chains.
    authors: Counter[Author] = Counter()
    for segment in (segment for t in trajectories for segment in t.segments):
        authors += segment.tokens_by_author
    out |= {
        "chain/turns": _mean(len(t.turns) for t in trajectories),
        "chain/segments": _mean(len(t.segments) for t in trajectories),
        "chain/sampled_tokens": authors[Author.MODEL] / count,
        "chain/sampled_tokens_max": float(max((t.sampled_tokens for t in trajectories), default=0)),
        "chain/prompt_tokens": (authors[Author.TASK] + authors[Author.HISTORY]) / count,
        "chain/observation_tokens": (authors[Author.TOOL] + authors[Author.USER]) / count,
        "chain/seconds": _mean(t.seconds for t in trajectories),
        "chain/retries": float(sum(t.attempts - 1 for t in trajectories)),
    }

    # Calls. Unknown tool names are only counted: one metric per invented name would grow without bound.
    calls = [call for t in trajectories for call in t.calls]
    status = Counter(call.status for call in calls)
    out["calls/chain"] = len(calls) / count
    for kind in (CallStatus.ERROR, CallStatus.TIMEOUT, CallStatus.INVALID, CallStatus.UNKNOWN):
        out[f"calls/{kind.value}_rate"] = status[kind] / max(len(calls), 1)
    out["calls/repeated_rate"] = sum(call.repeated for call in calls) / max(len(calls), 1)
    tool_calls = Counter(
        call.name for call in calls if call.status in (CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT)
    )
    out |= {f"calls/tool/{name}": number / count for name, number in tool_calls.items()}
    if blocked := sum(call.blocked for call in calls):
        out["calls/blocked_seconds"] = blocked

    # Outcomes.
    out["chain/truncated"] = _mean(t.stop.failure is FailureKind.TRUNCATION for t in trajectories)
    failures = Counter(failure.kind for t in trajectories for failure in t.failures)
    out |= {f"stop/{stop.value}": n for stop, n in Counter(t.stop for t in trajectories).items()}
    out |= {f"failure/{kind.value}": n for kind, n in failures.items()}
    out |= {f"treatment/{treatment.value}": n for treatment, n in Counter(t.treatment for t in trajectories).items()}
    uniform = [is_uniform(group) for group in groups(trajectories) if sum(map(_counts_in_group, group)) > 1]
    if uniform:
        out["group/zero_variance"] = _mean(uniform)
    sequences = [[tuple(call.action for call in t.calls) for t in group] for group in groups(trajectories)]
    distinct = [len(set(group)) / len(group) for group in sequences if len(group) > 1 and any(group)]
    if distinct:
        out["group/distinct_actions"] = _mean(distinct)

    # The mean of every number that the reward reported in addition to its total, and its share of the variance.
    reported: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in reported_components(trajectory).items():
            reported.setdefault(name, []).append(value)
    out |= {f"score/{name}": sum(values) / len(values) for name, values in reported.items()}
    out |= component_shares(trajectories)

    # Staleness: weight versions between sampling and training, per sampled token.
    ages = [] if version is None else [version - s.weight_versions[s.mask] for t in trajectories for s in t.segments]
    if sum(map(len, ages)):
        tokens = np.concatenate(ages)
        out["policy/staleness"] = float(tokens.mean())
        out["policy/staleness_max"] = float(tokens.max())
    return out


def groups(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The chains, grouped by task."""
    out: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        out.setdefault(trajectory.group, []).append(trajectory)
    return list(out.values())


def is_uniform(group: Iterable[Trajectory]) -> bool:
    """Whether all compared chains have the same return from each turn on, so that their advantages are zero.

    Shorter chains are padded with the return of their last turn, as in the group-based algorithms.
    """
    returns = [_returns(t) for t in group if _counts_in_group(t)]
    longest = max(map(len, returns), default=0)
    return len({row + row[-1:] * (longest - len(row)) for row in returns}) <= 1


def _counts_in_group(trajectory: Trajectory) -> bool:
    return trajectory.treatment in (TrainingTreatment.TRAIN, TrainingTreatment.ZERO)


def _returns(trajectory: Trajectory) -> tuple[float, ...]:
    """The return from each turn on; a single number if it is the same for all; empty if the chain has no score."""
    score = trajectory.score
    if trajectory.treatment is TrainingTreatment.ZERO:
        return (0.0,)
    if score is None or score.per_turn is None:
        return () if score is None else (score.total,)
    missing = max(len(trajectory.turns), 1) - len(score.per_turn)
    return tuple(accumulate((*score.per_turn, *[0.0] * missing)[::-1]))[::-1]


def component_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The fraction of the reward's variance that each component explains; empty if fewer than two of them vary.

    Components are the reported numbers of which the total is a weighted sum. The weights are found by least squares
    over the chains of a step: with standardized components x [chains, components] and reward y [chains], y = x w, and
    the share of component i is w_i^2 / sum_j w_j^2.
    """
    scored = [t for t in trajectories if t.score is not None]
    numbers = [reported_components(t) for t in scored]
    names = sorted(set.intersection(*map(set, numbers))) if numbers else []
    if not 2 <= len(names) <= MAX_COMPONENTS or len(scored) <= len(names) + 1:
        return {}
    figures = np.array([[components[name] for name in names] for components in numbers], np.float64)
    rewards = np.array([t.reward for t in scored], np.float64)
    if np.abs(rewards).max() > _MAX_VALUE or rewards.std() < _MIN_STD:
        return {}
    spread = figures.std(axis=0)
    varying = spread > _MIN_STD
    standardized = (figures - figures.mean(axis=0))[:, varying] / spread[varying]
    target = (rewards - rewards.mean()) / rewards.std()
    weights, *_ = np.linalg.lstsq(standardized, target, rcond=None)
    has_weight = np.abs(weights) > 1e-3
    if np.abs(standardized @ weights - target).max() > 1e-3 or has_weight.sum() < 2:
        return {}  # the total is not a weighted sum of them, or equals one of them
    squares = weights[has_weight] ** 2
    components = np.array(names)[varying][has_weight]
    return {
        f"reward_share/{name}": float(square / squares.sum()) for name, square in zip(components, squares, strict=True)
    }


def reported_components(trajectory: Trajectory) -> dict[str, float]:
    """The numbers that a reward reported, without those whose square overflows a float."""
    metrics = {} if trajectory.score is None else trajectory.score.metrics
    return {n: float(v) for n, v in metrics.items() if isinstance(v, int | float) and abs(v) < _MAX_VALUE}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(len(listed), 1)
