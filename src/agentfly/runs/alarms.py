"""Training alarms: known failure modes of agent training, each with the ids of chains that show it.

Every check computes a severity, which is 1 at the threshold. An alarm is raised once; the same kind can be raised again
only after its severity has fallen below `CLEAR`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from agentfly.runs.metrics import groups, is_uniform, reported_components
from agentfly.runs.record import SOLVED, Alarm, EvalFigures
from agentfly.trajectory import CallStatus, Trajectory

CLEAR = 0.8
"""The severity below which an alarm is reset."""
MAX_HISTORY = 300
"""Steps that a monitor keeps: the first ones and the last."""
MAX_CHAINS = 4
"""Maximum number of chains that an alarm names."""

Metrics = Mapping[str, float]
ChainRank = Callable[[Trajectory], float]


@dataclass(frozen=True, slots=True)
class AlarmThresholds:
    """Alarm thresholds. Fractions are between 0 and 1; the first steps are the baseline for later ones."""

    first: int = 5
    """Number of baseline steps; drift is not checked before they are complete."""
    recent: int = 3
    """Number of recent steps whose mean is compared with a threshold, so that one outlier raises no alarm."""
    lost: float = 0.5
    """Fraction of a step's chains that failed through no fault of the model."""
    zero_variance: float = 0.8
    """Fraction of groups in which all chains have the same reward."""
    entropy: float = 0.2
    """Fraction of the baseline entropy below which the policy has collapsed."""
    drift: float = 2.5
    """Factor by which the length or the turns of chains may grow or shrink against the baseline."""
    tool_errors: float = 0.5
    """Fraction of calls that may fail because of errors in the tools."""
    failing_calls: float = 0.99
    """Fraction of a step's calls that may fail, whatever the cause; checked from the first step on."""
    repeated_calls: float = 0.5
    """Fraction of a step's calls that may repeat a call of their chain which got the same observation."""
    surge: float = 0.25
    """Amount by which the fraction of failed calls, whatever the cause, may exceed the baseline."""
    kl: float = 0.5
    """KL divergence from the reference, in nats per token."""
    kl_jump: float = 20.0
    """Factor by which the KL may exceed its median so far, once it is above a tenth of `kl`."""
    dominance: float = 0.98
    """Fraction of the reward's variance that one component may explain while others vary too."""
    solved: float = 0.9
    """Fraction of the best reward so far, and of 1, from which the mean reward says that the tasks are solved."""
    collapse: float = 0.25
    """Fraction of its recent peak below which the mean reward has collapsed."""
    sacrifice: float = 0.3
    """Fraction of its best mean that a component may lose while the reward is at its best."""


@dataclass(frozen=True, slots=True)
class AlarmReading:
    """The result of one check."""

    severity: float
    message: str
    rank: ChainRank
    """Ranks the chains; those with the highest values are named. NaN excludes a chain."""


class AlarmMonitor:
    """Checks every step of a run. After a resume, call `observe` for the steps so far."""

    def __init__(self, limits: AlarmThresholds | None = None) -> None:
        self._limits = limits or AlarmThresholds()
        self._history: list[Metrics] = []
        self._raised: set[str] = set()

    def observe(
        self,
        step: int,
        metrics: Metrics,
        trajectories: Sequence[Trajectory] = (),
        tools: Sequence[str] = (),
        evaluation: EvalFigures | None = None,
    ) -> tuple[Alarm, ...]:
        """Return the alarms that this step raises; a step without metrics, such as step 0, raises none.

        tools: names of the agent's tools, for the message of an alarm. evaluation: the one after this step.
        """
        if not metrics:
            return ()
        if evaluation is not None and math.isfinite(evaluation.reward):
            metrics = {**metrics, _HELD_OUT: evaluation.reward}
        self._history.append(metrics)
        if len(self._history) > MAX_HISTORY:
            del self._history[2 * self._limits.first]  # keeps the baseline steps
        alarms = []
        solved = _is_solved(self._history, self._limits, CLEAR if SOLVED in self._raised else 1.0)
        if not solved:
            self._raised.discard(SOLVED)
        for kind, check in _CHECKS.items():
            finding = check(self._history, self._limits)
            if finding is None:  # not measured: the state of the alarm does not change
                continue
            if finding.severity < CLEAR:
                self._raised.discard(kind)
            elif solved and kind in _SIGNS_OF_SUCCESS:
                if finding.severity >= 1 and not self._raised & {kind, SOLVED}:
                    self._raised.add(SOLVED)
                    alarms.append(Alarm(SOLVED, "the tasks are solved: use harder ones", step=step))
            elif finding.severity >= 1 and kind not in self._raised:
                self._raised.add(kind)
                message = finding.message
                if kind == "failures":
                    message += most_common_failure(trajectories)
                elif kind == "failing_calls":
                    message += list_failed_calls(trajectories, tools)
                examples = trajectories
                if kind == "zero_variance":
                    uniform = (group for group in groups(trajectories) if len(group) > 1 and is_uniform(group))
                    examples = [group[0] for group in uniform]
                ranked = [(finding.rank(t), t.id) for t in examples]
                ranked = sorted((pair for pair in ranked if not math.isnan(pair[0])), key=lambda pair: -pair[0])
                alarms.append(Alarm(kind, message, tuple(chain for _, chain in ranked[:MAX_CHAINS]), step))
        return tuple(alarms)


def _is_solved(history: Sequence[Metrics], limits: AlarmThresholds, factor: float) -> bool:
    """Whether the training reward is near the maximum, or high where the last two held-out rewards are near it.

    The maximum is not known: it is the best reward so far, and at least 1. factor: scales the threshold.
    """
    now = _recent(history, "reward/mean", limits)
    if now is None:
        return False
    threshold = factor * limits.solved * max([1.0, *_numbers(history, "reward/max")])
    held_out = _numbers(history, _HELD_OUT)[-2:]
    steady = len(held_out) == 2 and min(held_out) >= threshold
    return now >= (CLEAR * threshold if steady else threshold)


def _check_failures(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    share = history[-1].get("treatment/lost")
    if share is None:
        return None
    message = f"{share:.0%} of the chains failed and are not trained"
    return AlarmReading(share / limits.lost, message, lambda t: 1.0 if t.failures else math.nan)


def _check_zero_variance(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    share = _recent(history, "group/zero_variance", limits)
    if share is None:
        return None
    message = (
        f"in {share:.0%} of the groups every chain earns the same, so their advantages are zero; "
        "use tasks that are neither too hard nor too easy, more chains per task, or a finer reward"
    )
    return AlarmReading(share / limits.zero_variance, message, lambda t: 1.0)


def _check_reward(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    """The reward fell to a fraction of its peak within the last `first` + `recent` steps."""
    values = _numbers(history[-limits.first - limits.recent :], "reward/mean")
    earlier, now = values[: -limits.recent], _recent(history, "reward/mean", limits)
    if len(earlier) < 2 or now is None:  # one step is too noisy to be a peak
        return None
    peak = max(_mean(pair) for pair in pairwise(earlier))
    if peak <= 0:
        return None
    message = (
        f"the mean reward fell from {peak:.3g} to {now:.3g} within a few steps; lower optimizer.learning_rate, and "
        "resume from a checkpoint before the fall"
    )
    return AlarmReading(peak * limits.collapse / max(now, 1e-12), message, lambda t: -(t.reward or 0.0))


def _check_entropy(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    baseline, now = _baseline(history, "policy/entropy", limits), _recent(history, "policy/entropy", limits)
    if baseline is None or now is None or baseline <= 0:
        return None
    message = (
        f"entropy fell from {baseline:.3g} to {now:.3g}: the policy has become nearly deterministic; "
        "raise the temperature or the entropy bonus, or lower the learning rate"
    )
    return AlarmReading(baseline * limits.entropy / max(now, 1e-12), message, _mean_logprob)


def _make_drift_check(
    name: str, what: str, size: ChainRank
) -> Callable[[Sequence[Metrics], AlarmThresholds], AlarmReading | None]:
    def check(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
        baseline, now = _baseline(history, name, limits), _recent(history, name, limits)
        if not baseline or now is None or baseline < 0 or now < 0:
            return None
        factor = now / baseline
        message = (
            f"chains have {now:.3g} {what}, {baseline:.3g} at first; "
            "read some of them: is this useful work or reward hacking?"
        )
        if factor >= 1:
            return AlarmReading(factor / limits.drift, message, size)
        return AlarmReading(1 / (max(factor, 1e-12) * limits.drift), message, lambda t: -size(t))

    return check


def _check_failing_calls(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    last = history[-1]
    if not last.get("calls/chain"):
        return None
    failed = sum(last.get(f"calls/{kind.value}_rate", 0.0) for kind in _FAILURE_TEXTS)
    message = f"{failed:.0%} of tool calls fail, so nothing can be learned about using the tools"
    return AlarmReading(failed / limits.failing_calls, message, _failed_calls)


def _check_repeated_calls(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    repeated = _recent(history, "calls/repeated_rate", limits)
    if repeated is None:
        return None
    message = (
        f"{repeated:.0%} of tool calls repeat a call of their chain that got the same observation; the agent goes in "
        "circles, and on_repeated_call=RecoveryRule(nudge=…) or 'end' stops it"
    )
    return AlarmReading(
        repeated / limits.repeated_calls, message, lambda t: float(sum(call.repeated for call in t.calls)) or math.nan
    )


def _check_tool_errors(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    errors = _recent(history, "calls/error_rate", limits)
    if errors is None:
        return None
    rates = [{"failed": sum(m.get(f"calls/{kind.value}_rate", 0.0) for kind in _FAILURE_TEXTS)} for m in history]
    failed, baseline = _recent(rates, "failed", limits), _baseline(rates, "failed", limits)
    if failed is not None and baseline is not None and (failed - baseline) / limits.surge > errors / limits.tool_errors:
        message = f"{failed:.0%} of tool calls fail, {baseline:.0%} did at first; look at the calls and their results"
        return AlarmReading((failed - baseline) / limits.surge, message, _failed_calls)
    message = f"{errors:.0%} of tool calls fail because of tool errors; look at the tools and their environments"
    return AlarmReading(errors / limits.tool_errors, message, _failed_calls)


def _check_kl(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    last = history[-1].get("policy/kl", math.nan)
    if not math.isfinite(last):
        return None
    so_far = _numbers(history, "policy/kl")
    typical = median(so_far) if len(so_far) > limits.first else math.inf
    severity = last / limits.kl
    if last > limits.kl / 10 and typical > 0:
        severity = max(severity, last / (typical * limits.kl_jump))
    message = (
        f"the policy is {last:.3g} nats per token from its reference; "
        "lower the learning rate, raise the KL coefficient, or resume from an earlier checkpoint"
    )
    return AlarmReading(severity, message, lambda t: -_mean_logprob(t))


def _check_memory(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    retries = history[-1].get("update/out_of_memory")
    if retries is None:
        return None
    size = history[-1].get("update/micro_batch_tokens", math.nan)
    message = (
        f"the update ran out of memory {retries:.0f} times and continues with micro_batch_tokens={size:.0f}; "
        "set gradient_checkpointing=true or that size from the start to be faster"
    )
    return AlarmReading(retries, message, lambda t: float(t.sampled_tokens))


def _check_finite(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    broken = [name for name, value in history[-1].items() if not math.isfinite(value)]
    message = f"{', '.join(sorted(broken)[:MAX_CHAINS])} is not finite; resume from a checkpoint before this step"
    return AlarmReading(math.inf if broken else 0.0, message, lambda t: float(t.sampled_tokens))


def _check_components(history: Sequence[Metrics], limits: AlarmThresholds) -> AlarmReading | None:
    """One component explains nearly all of the reward, or the reward rises at the expense of one."""
    shares = {
        name: _recent(history, name, limits) for m in history[-1:] for name in m if name.startswith(_SHARE_PREFIX)
    }
    share_of = {name[len(_SHARE_PREFIX) :]: share for name, share in shares.items() if share is not None}
    if not share_of:
        return None
    first = max(share_of, key=lambda name: share_of[name])
    message = (
        f"{first!r} explains {share_of[first]:.0%} of the reward's variance; the other components have "
        "almost no effect (algorithm=gdpo normalizes each of several rewards on its own)"
    )
    severity = (1 - limits.dominance) / max(1 - share_of[first], 1e-12)  # the limit is near 1: the distance to 1 counts
    finding = AlarmReading(severity, message, _component_rank(first))
    rewards = _means(history, "reward/mean", limits)
    for name in share_of:
        parts = _means(history, f"score/{name}", limits)
        if min(len(rewards), len(parts)) < limits.first or rewards[-1] < max(rewards) or max(parts) <= 0:
            continue
        loss = (max(parts) - parts[-1]) / max(parts) / limits.sacrifice
        if loss >= max(finding.severity, CLEAR):
            message = f"the reward is at its best while its component {name!r} falls; is {first!r} being exploited?"
            finding = AlarmReading(loss, message, lambda t, n=name: -_component_rank(n)(t))  # type: ignore[misc]
    return finding


_HELD_OUT = "eval/reward"
_SIGNS_OF_SUCCESS = ("zero_variance", "entropy_collapse")
"""Alarms that solved tasks would raise too."""
_SHARE_PREFIX = "reward_share/"
_FAILURE_TEXTS = {
    CallStatus.ERROR: "an error in the tool",
    CallStatus.TIMEOUT: "longer than the tool's time limit",
    CallStatus.INVALID: "unreadable, or with wrong arguments",
    CallStatus.UNKNOWN: "no such tool",
}
_CHECKS: dict[str, Callable[[Sequence[Metrics], AlarmThresholds], AlarmReading | None]] = {
    "failures": _check_failures,
    "zero_variance": _check_zero_variance,
    "reward_collapse": _check_reward,
    "entropy_collapse": _check_entropy,
    "length_drift": _make_drift_check("chain/sampled_tokens", "sampled tokens", lambda t: float(t.sampled_tokens)),
    "turn_drift": _make_drift_check("chain/turns", "turns", lambda t: float(len(t.turns))),
    "failing_calls": _check_failing_calls,
    "tool_errors": _check_tool_errors,
    "repeated_calls": _check_repeated_calls,
    "kl_blow_up": _check_kl,
    "reward_dominance": _check_components,
    "not_finite": _check_finite,
    "out_of_memory": _check_memory,
}


def _numbers(history: Iterable[Metrics], name: str) -> list[float]:
    return [m[name] for m in history if math.isfinite(m.get(name, math.nan))]


def _means(history: Sequence[Metrics], name: str, limits: AlarmThresholds) -> list[float]:
    """The moving mean of a metric."""
    values = _numbers(history, name)
    return [_mean(values[end - limits.recent : end]) for end in range(limits.recent, len(values) + 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # infinite where `fmean` would raise


def _recent(history: Sequence[Metrics], name: str, limits: AlarmThresholds) -> float | None:
    """The mean of the last steps; None if one of them lacks the metric."""
    values = _numbers(history[-limits.recent :], name)
    return _mean(values) if len(values) == limits.recent else None


def _baseline(history: Sequence[Metrics], name: str, limits: AlarmThresholds) -> float | None:
    """The mean of the first steps; None until they are complete."""
    values = _numbers(history[: limits.first * 2], name)[: limits.first]
    return _mean(values) if len(values) == limits.first and len(history) > limits.first else None


def most_common_failure(trajectories: Iterable[Trajectory]) -> str:
    """The most common failure, as the continuation of a sentence; empty if there are no failures."""
    broken = Counter(f"{t.failures[-1].kind.value}: {t.failures[-1].message}" for t in trajectories if t.failures)
    return "".join(f"; most often: {failure} ({count} chains)" for failure, count in broken.most_common(1))


def list_failed_calls(trajectories: Iterable[Trajectory], tools: Sequence[str]) -> str:
    """What the most common failed calls called and how they failed, and the tools there are."""
    failed = Counter((c.name, c.status) for t in trajectories for c in t.calls if c.status in _FAILURE_TEXTS)
    called = [
        f"{repr(name) if name else 'a call without a name'} ({_FAILURE_TEXTS[status]}, {count} times)"
        for (name, status), count in failed.most_common(MAX_CHAINS)
    ]
    return f"; called: {', '.join(called)}; the agent's tools: {', '.join(tools) or 'none'}" if called else ""


def _mean_logprob(trajectory: Trajectory) -> float:
    """The mean log-probability of the sampled tokens; NaN if there are none."""
    total = sum(float(segment.logprobs.sum()) for segment in trajectory.segments)
    return total / trajectory.sampled_tokens if trajectory.sampled_tokens else math.nan


def _failed_calls(trajectory: Trajectory) -> float:
    return float(sum(call.status in _FAILURE_TEXTS for call in trajectory.calls)) or math.nan


def _component_rank(name: str) -> ChainRank:
    return lambda trajectory: reported_components(trajectory).get(name, math.nan)
