"""Alarms that know what goes wrong when agents are trained; each names the chains to look at.

An alarm is raised from a pressure, a number that reaches 1 where things are bad enough. It is raised once: not until
its pressure has fallen below `CLEAR` can the same kind be raised again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from agentfly.outcome import CallStatus
from agentfly.runs.components import reported
from agentfly.runs.metrics import groups, is_uniform
from agentfly.runs.record import Alarm
from agentfly.trajectory import Trajectory

CLEAR = 0.8
"""The pressure below which an alarm is over."""
KEPT = 300
"""Steps that a watch remembers: the first ones, and the last."""
NAMED = 4
"""Most chains that an alarm names."""

Metrics = Mapping[str, float]
Worst = Callable[[Trajectory], float]


@dataclass(frozen=True, slots=True)
class Limits:
    """When to raise an alarm. A rate is a share of 1; the first steps are what later ones are held against."""

    first: int = 5
    """Steps that say what is usual; nothing is called a drift before they are over."""
    recent: int = 3
    """Steps whose mean is held against a limit, so that one odd step is none."""
    lost: float = 0.5
    """Share of a step's chains that failed by no fault of the model."""
    zero_variance: float = 0.8
    """Share of groups in which every chain earned the same."""
    entropy: float = 0.2
    """Share of its usual entropy below which a policy has collapsed."""
    drift: float = 2.5
    """By what factor the length or turns of chains may change from the usual, either way."""
    tool_errors: float = 0.5
    """Share of calls that may fail by the tools' own fault."""
    surge: float = 0.25
    """By how much the share of failed calls, whosever fault, may exceed the usual."""
    kl: float = 0.5
    """Divergence from the reference, in nats a token."""
    kl_jump: float = 20.0
    """By what factor it may exceed its median so far, once it is a tenth of `kl`."""
    dominance: float = 0.98
    """Share of the reward's variance that one of its components may explain while others vary too."""
    sacrifice: float = 0.3
    """How much of its best mean a component may lose while the reward is at its best."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look at the figures says."""

    pressure: float
    message: str
    worst: Worst
    """Ranks the chains; the highest are named. NaN leaves a chain out."""


class Watch:
    """Looks at every step of a run. After a resume, let it look at the steps so far."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._history: list[Metrics] = []
        self._raised: set[str] = set()

    def look(self, step: int, metrics: Metrics, trajectories: Sequence[Trajectory] = ()) -> tuple[Alarm, ...]:
        """The alarms that this step raises; one that was not measured, such as step 0, raises none."""
        if not metrics:
            return ()
        self._history.append(metrics)
        if len(self._history) > KEPT:
            del self._history[2 * self._limits.first]  # behind the steps that say what is usual
        alarms = []
        for kind, find in _KINDS.items():
            finding = find(self._history, self._limits)
            if finding is None:  # nothing was measured, so what was raised stays raised
                continue
            if finding.pressure < CLEAR:
                self._raised.discard(kind)
            elif finding.pressure >= 1 and kind not in self._raised:
                self._raised.add(kind)
                said = finding.message + (most_common_failure(trajectories) if kind == "failures" else "")
                alarms.append(Alarm(kind, said, _named(kind, trajectories, finding.worst), step))
        return tuple(alarms)


def _lost(history: Sequence[Metrics], limits: Limits) -> Finding | None:
    share = history[-1].get("treatment/lost")
    if share is None:
        return None
    message = f"{share:.0%} of the chains failed and are not trained"
    return Finding(share / limits.lost, message, lambda t: 1.0 if t.failures else math.nan)


def _zero_variance(history: Sequence[Metrics], limits: Limits) -> Finding | None:
    share = _recent(history, "group/zero_variance", limits)
    if share is None:
        return None
    message = (
        f"in {share:.0%} of the groups every chain earns the same, so nothing is learned from them; "
        "give tasks that are neither too hard nor too easy, more chains a task, or a finer reward"
    )
    return Finding(share / limits.zero_variance, message, lambda t: 1.0)


def _entropy(history: Sequence[Metrics], limits: Limits) -> Finding | None:
    usual, now = _usual(history, "policy/entropy", limits), _recent(history, "policy/entropy", limits)
    if usual is None or now is None or usual <= 0:
        return None
    message = (
        f"entropy fell from {usual:.3g} to {now:.3g}: the model hardly varies any more; "
        "raise the temperature or the entropy bonus, or lower the learning rate"
    )
    return Finding(usual * limits.entropy / max(now, 1e-12), message, _certainty)


def _drift(name: str, what: str, size: Worst) -> Callable[[Sequence[Metrics], Limits], Finding | None]:
    def find(history: Sequence[Metrics], limits: Limits) -> Finding | None:
        usual, now = _usual(history, name, limits), _recent(history, name, limits)
        if not usual or now is None or usual < 0 or now < 0:
            return None
        factor = now / usual
        message = f"chains have {now:.3g} {what}, {usual:.3g} at first; read some: is it work, or a way to the reward?"
        if factor >= 1:
            return Finding(factor / limits.drift, message, size)
        return Finding(1 / (max(factor, 1e-12) * limits.drift), message, lambda t: -size(t))

    return find


def _tool_errors(history: Sequence[Metrics], limits: Limits) -> Finding | None:
    errors = _recent(history, "calls/error_rate", limits)
    if errors is None:
        return None
    rates = [{"failed": sum(m.get(f"calls/{kind}_rate", 0.0) for kind in _FAILED)} for m in history]
    failed, usual = _recent(rates, "failed", limits), _usual(rates, "failed", limits)
    if failed is not None and usual is not None and (failed - usual) / limits.surge > errors / limits.tool_errors:
        message = f"{failed:.0%} of tool calls fail, {usual:.0%} did at first; look at what is called and what answers"
        return Finding((failed - usual) / limits.surge, message, _failed_calls)
    message = f"{errors:.0%} of tool calls fail by the tools' own fault; look at the tools and their environments"
    return Finding(errors / limits.tool_errors, message, _failed_calls)


def _kl(history: Sequence[Metrics], limits: Limits) -> Finding | None:
    last = history[-1].get("policy/kl", math.nan)
    if not math.isfinite(last):
        return None
    so_far = _numbers(history, "policy/kl")
    usual = median(so_far) if len(so_far) > limits.first else math.inf
    pressure = last / limits.kl
    if last > limits.kl / 10 and usual > 0:
        pressure = max(pressure, last / (usual * limits.kl_jump))
    message = (
        f"the policy is {last:.3g} nats a token from its reference; "
        "lower the learning rate, raise the weight of kl, or go back to a checkpoint"
    )
    return Finding(pressure, message, lambda t: -_certainty(t))


def _not_finite(history: Sequence[Metrics], limits: Limits) -> Finding | None:
    broken = [name for name, value in history[-1].items() if not math.isfinite(value)]
    message = f"{', '.join(sorted(broken)[:NAMED])} is no finite number; go back to a checkpoint before this step"
    return Finding(math.inf if broken else 0.0, message, lambda t: float(t.sampled_tokens))


def _dominance(history: Sequence[Metrics], limits: Limits) -> Finding | None:
    """One component explains nearly all of the reward, or the reward rises at the cost of one."""
    shares = {name: _recent(history, name, limits) for m in history[-1:] for name in m if name.startswith(_SHARE)}
    known = {name[len(_SHARE) :]: share for name, share in shares.items() if share is not None}
    if not known:
        return None
    first = max(known, key=lambda name: known[name])
    message = (
        f"{first!r} explains {known[first]:.0%} of the reward's variance; the other components teach next to nothing"
    )
    finding = Finding(_past(known[first], limits.dominance), message, _component(first))
    for name in known:
        given_up = _sacrificed(history, name, limits)
        if given_up >= max(finding.pressure, CLEAR):
            message = f"the reward is at its best while its component {name!r} falls; is {first!r} being gamed?"
            finding = Finding(given_up, message, lambda t, n=name: -_component(n)(t))  # type: ignore[misc]
    return finding


def _past(share: float, limit: float) -> float:
    """Pressure of a share whose limit is near 1: what is missing to 1 counts, not the share itself."""
    return (1 - limit) / max(1 - share, 1e-12)


def _sacrificed(history: Sequence[Metrics], name: str, limits: Limits) -> float:
    """How much of what is too much a component has lost, where the reward is at its best; else 0."""
    rewards, parts = _means(history, "reward/mean", limits), _means(history, f"score/{name}", limits)
    if len(rewards) < limits.first or len(parts) < limits.first or rewards[-1] < max(rewards) or max(parts) <= 0:
        return 0.0
    return (max(parts) - parts[-1]) / max(parts) / limits.sacrifice


_SHARE = "reward_share/"
_FAILED = ("error", "invalid", "unknown")
_KINDS: dict[str, Callable[[Sequence[Metrics], Limits], Finding | None]] = {
    "failures": _lost,
    "zero_variance": _zero_variance,
    "entropy_collapse": _entropy,
    "length_drift": _drift("chain/sampled_tokens", "sampled tokens", lambda t: float(t.sampled_tokens)),
    "turn_drift": _drift("chain/turns", "turns", lambda t: float(len(t.turns))),
    "tool_errors": _tool_errors,
    "kl_blow_up": _kl,
    "reward_dominance": _dominance,
    "not_finite": _not_finite,
}


def _numbers(history: Iterable[Metrics], name: str) -> list[float]:
    return [m[name] for m in history if math.isfinite(m.get(name, math.nan))]


def _means(history: Sequence[Metrics], name: str, limits: Limits) -> list[float]:
    """The moving mean of a figure."""
    values = _numbers(history, name)
    return [_mean(values[end - limits.recent : end]) for end in range(limits.recent, len(values) + 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # infinite where `fmean` would raise


def _recent(history: Sequence[Metrics], name: str, limits: Limits) -> float | None:
    """The mean of the last steps; None before there are enough, or where the last did not measure it."""
    values = _numbers(history[-limits.recent :], name)
    return _mean(values) if len(values) == limits.recent else None


def _usual(history: Sequence[Metrics], name: str, limits: Limits) -> float | None:
    """The mean of the first steps; None while they last."""
    values = _numbers(history[: limits.first * 2], name)[: limits.first]
    return _mean(values) if len(values) == limits.first and len(history) > limits.first else None


def _named(kind: str, trajectories: Sequence[Trajectory], worst: Worst) -> tuple[str, ...]:
    if kind == "zero_variance":
        trajectories = [t for group in groups(trajectories) if len(group) > 1 and is_uniform(group) for t in group[:1]]
    ranked = [(worst(t), t.id) for t in trajectories]
    return tuple(name for rank, name in sorted((r for r in ranked if r[0] == r[0]), key=lambda r: -r[0])[:NAMED])


def most_common_failure(trajectories: Iterable[Trajectory]) -> str:
    """What broke most chains, to go on a sentence with; empty where nothing did."""
    broken = Counter(f"{t.failures[-1].kind.value}: {t.failures[-1].message}" for t in trajectories if t.failures)
    return "".join(f"; most often: {said} ({count} chains)" for said, count in broken.most_common(1))


def _certainty(trajectory: Trajectory) -> float:
    """The mean log-probability of what the model wrote; NaN where it wrote nothing."""
    total = sum(float(segment.logprobs.sum()) for segment in trajectory.segments)
    return total / trajectory.sampled_tokens if trajectory.sampled_tokens else math.nan


def _failed_calls(trajectory: Trajectory) -> float:
    failed = {CallStatus.ERROR, CallStatus.INVALID, CallStatus.UNKNOWN}
    return float(sum(call.status in failed for call in trajectory.calls)) or math.nan


def _component(name: str) -> Worst:
    return lambda trajectory: reported(trajectory).get(name, math.nan)
