"""What chains were like, in numbers: pure functions of finished trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from agentfly.outcome import CallStatus, FailureKind, Treatment
from agentfly.runs.components import component_means, component_shares
from agentfly.segment import Author
from agentfly.trajectory import Trajectory


def chain_metrics(trajectories: Sequence[Trajectory], version: int | None = None) -> dict[str, float]:
    """Figures of chains by name. With the `version` that is being trained, also how old their weights were."""
    out = {"chains": float(len(trajectories))}
    out.update(_rewards(trajectories))
    out.update(_lengths(trajectories))
    out.update(_calls(trajectories))
    out.update(_ends(trajectories))
    spread = [is_uniform(group) for group in groups(trajectories) if sum(map(_counts, group)) > 1]
    if spread:
        out["group/zero_variance"] = _mean(spread)
    out.update(component_means(trajectories))
    out.update(component_shares(trajectories))
    if version is not None:
        out.update(_staleness(trajectories, version))
    return out


def groups(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """The chains of each task together."""
    out: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        out.setdefault(trajectory.group, []).append(trajectory)
    return list(out.values())


def is_uniform(group: Iterable[Trajectory]) -> bool:
    """Whether all chains that count earned the same from each turn on: comparing them teaches nothing.

    A chain that ended sooner stands with what its last turn earned, as in the algorithms that compare.
    """
    earned = [_earned(t) for t in group if _counts(t)]
    longest = max(map(len, earned), default=0)
    return len({each + each[-1:] * (longest - len(each)) for each in earned}) <= 1


def _counts(trajectory: Trajectory) -> bool:
    return trajectory.treatment in (Treatment.TRAIN, Treatment.ZERO)


def _earned(trajectory: Trajectory) -> tuple[float, ...]:
    """What a chain earned from each turn on; a single number where that is the same; none where nobody knows."""
    score = trajectory.score
    if trajectory.treatment is Treatment.ZERO:
        return (0.0,)
    if score is None or score.per_turn is None:
        return () if score is None else (score.total,)
    unpaid = max(len(trajectory.turns), 1) - len(score.per_turn)
    return tuple(accumulate((*score.per_turn, *[0.0] * unpaid)[::-1]))[::-1]


def _rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = np.array([t.reward for t in trajectories if t.reward is not None])
    out = {
        "reward/unscored": _mean(t.reward is None for t in trajectories),
        "treatment/lost": _mean(not _counts(t) for t in trajectories),
    }
    if len(rewards):
        for name in ("mean", "std", "min", "max"):
            out[f"reward/{name}"] = float(getattr(rewards, name)())
        if set(rewards) <= {0.0, 1.0}:
            out["reward/success"] = out["reward/mean"]
    return out


def _lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    authors: Counter[Author] = Counter()
    for span in (span for t in trajectories for segment in t.segments for span in segment.spans):
        authors[span.author] += len(span)
    count = max(len(trajectories), 1)
    return {
        "chain/turns": _mean(len(t.turns) for t in trajectories),
        "chain/segments": _mean(len(t.segments) for t in trajectories),
        "chain/sampled_tokens": authors[Author.MODEL] / count,
        "chain/sampled_tokens_max": float(max((t.sampled_tokens for t in trajectories), default=0)),
        "chain/prompt_tokens": (authors[Author.TASK] + authors[Author.HISTORY]) / count,
        "chain/observation_tokens": (authors[Author.TOOL] + authors[Author.USER]) / count,
        "chain/seconds": _mean(t.seconds for t in trajectories),
        "chain/retries": float(sum(t.attempts - 1 for t in trajectories)),
    }


def _calls(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    calls = [call for t in trajectories for call in t.calls]
    status = Counter(call.status for call in calls)
    made, count = max(len(calls), 1), max(len(trajectories), 1)
    out = {
        "calls/chain": len(calls) / count,
        "calls/error_rate": status[CallStatus.ERROR] / made,
        "calls/invalid_rate": status[CallStatus.INVALID] / made,
        "calls/unknown_rate": status[CallStatus.UNKNOWN] / made,
    }
    # A name that the model made up is counted above: as a metric of its own it would grow without end.
    named = Counter(call.name for call in calls if call.status in (CallStatus.OK, CallStatus.ERROR))
    out.update({f"calls/tool/{name}": made / count for name, made in named.items()})
    return out


def _ends(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    truncated = (t.stop.failure is FailureKind.TRUNCATION for t in trajectories)
    kinds = Counter(failure.kind for t in trajectories for failure in t.failures)
    return {
        "chain/truncated": _mean(truncated),
        **{f"stop/{stop.value}": n for stop, n in Counter(t.stop for t in trajectories).items()},
        **{f"failure/{kind.value}": n for kind, n in kinds.items()},
        **{f"treatment/{each.value}": n for each, n in Counter(t.treatment for t in trajectories).items()},
    }


def _staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """By how many versions the weights that sampled each token lag behind."""
    ages = [version - s.weight_versions[s.mask] for t in trajectories for s in t.segments]
    every = np.concatenate(ages) if ages else np.zeros(0)
    if not len(every):
        return {}
    return {"policy/staleness": float(every.mean()), "policy/staleness_max": float(every.max())}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(len(listed), 1)
