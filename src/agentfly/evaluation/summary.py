"""The figures of an evaluation: means over tasks with confidence intervals, and their table.

Chains of one task are correlated, so tasks are the unit: every figure is the mean of one value per task, and its 95 %
confidence interval follows from how those values vary. A proportion (values from 0 to 1) gets Wilson's interval, which
stays in that range and does not vanish where all tasks agree.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, pvariance, variance
from typing import TYPE_CHECKING, Any

from agentfly.errors import sanitize
from agentfly.runs.record import EvalFigures
from agentfly.trajectory import Trajectory
from agentfly.types import Task

if TYPE_CHECKING:
    from rich.console import Group

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % confidence interval."""

    mean: float
    """NaN without values."""
    low: float
    """NaN where there are too few values for an interval."""
    high: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Estimate:
        """From one value per task: mean ± z · sqrt(variance / n)."""
        if not values:
            return cls(math.nan, math.nan, math.nan)
        mean = fmean(values)
        half = _Z * math.sqrt(variance(values, mean) / len(values)) if len(values) > 1 else math.nan
        return cls(mean, mean - half, mean + half)

    @classmethod
    def from_proportions(cls, proportions: Sequence[float], chains: int) -> Estimate:
        """From one proportion per task: Wilson's interval for the effective number of independent yes/no outcomes.

        That is the number whose variance equals that of the proportions: one per task where the `chains` of a task
        always agree, and one per chain at most.
        """
        if not proportions:
            return cls.from_values(proportions)
        mean = fmean(proportions)
        count = float(len(proportions))
        if (spread := pvariance(proportions, mean)) > 0:
            count *= min(mean * (1 - mean) / spread, chains)
        middle = (mean + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
        half = _Z * math.sqrt(mean * (1 - mean) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
        return cls(mean, max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean)))

    @property
    def mean_text(self) -> str:
        return "–" if math.isnan(self.mean) else f"{self.mean:.3f}"

    @property
    def interval(self) -> str:
        return "" if math.isnan(self.low) else f"{self.low:.3f} – {self.high:.3f}"

    def __str__(self) -> str:
        return f"{self.mean_text} ({self.interval})" if self.interval else self.mean_text

    def to_json(self) -> list[float | None]:
        """Mean, low and high; NaN is null."""
        return [None if math.isnan(bound) else bound for bound in (self.mean, self.low, self.high)]


def pass_at_k(k: int, chains: int, successes: int) -> float:
    """Unbiased estimate of pass@k: 1 − C(chains − successes, k) / C(chains, k)."""
    return 1.0 - math.comb(chains - successes, k) / math.comb(chains, k)


@dataclass(frozen=True, slots=True)
class ChainResult:
    """What an evaluation stores of one chain."""

    group: int
    chain: int
    greedy: bool
    reward: float | None
    """None where the chain could not be scored."""
    stop: str
    turns: int
    calls: int
    tokens: int
    failure: str | None = None
    """The last failure's message, where the chain ended in a failure or has no reward; else None."""

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, *, greedy: bool) -> ChainResult:
        """The figures of a finished chain."""
        failed = trajectory.stop.failure is not None or trajectory.reward is None
        return cls(
            group=trajectory.group,
            chain=trajectory.chain,
            greedy=greedy,
            reward=trajectory.reward,
            stop=trajectory.stop.value,
            turns=len(trajectory.turns),
            calls=sum(1 for _ in trajectory.calls),
            tokens=trajectory.sampled_tokens,
            failure=trajectory.failures[-1].message if failed and trajectory.failures else None,
        )

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.chain


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of an evaluation, or of its tasks with one value of a column."""

    tasks: int
    chains: int
    """Number of chains, greedy ones included, as in `unscored`, `stops` and `failures`."""
    unscored: int
    """Chains without a reward."""
    reward: Estimate
    pass_at: Mapping[int, Estimate]
    """By k: the fraction of tasks that one of k chains solves; for k = 1, the fraction of chains that succeed."""
    greedy: Estimate | None
    """Fraction of tasks that a greedy chain solves; None without greedy chains."""
    turns: float
    calls: float
    tokens: float
    """Mean sampled tokens per chain; 0 where the server returns no ids to count."""
    stops: Mapping[str, int]
    """Chains by stop reason."""
    failures: Mapping[str, int]
    """Chains that failed or have no reward, by the message of their last failure."""
    by: Mapping[str, Mapping[str, Evaluation]] = field(default_factory=dict)
    """By column and value: the figures of the tasks that have it."""

    @property
    def success(self) -> Estimate:
        """Fraction of chains whose reward reaches the threshold."""
        return self.pass_at[1]

    @property
    def figures(self) -> EvalFigures:
        """The figures as a training run records them."""
        metrics = {f"pass@{k}": estimate.mean for k, estimate in self.pass_at.items()}
        metrics |= {"turns": self.turns, "calls": self.calls, "sampled_tokens": self.tokens}
        metrics |= {"unscored": float(self.unscored), **{f"stop/{name}": float(n) for name, n in self.stops.items()}}
        if self.greedy is not None:
            metrics["greedy"] = self.greedy.mean
        for column, parts in self.by.items():
            metrics |= {f"{column}={value}/reward": part.reward.mean for value, part in parts.items()}
        mean, low, high = self.reward.mean, self.reward.low, self.reward.high
        return EvalFigures(
            mean, mean if math.isnan(low) else low, mean if math.isnan(high) else high, self.tasks, metrics
        )

    def to_json(self) -> dict[str, Any]:
        """All figures, with each estimate as mean, low and high."""
        plain = {name: getattr(self, name) for name in ("tasks", "chains", "unscored", "turns", "calls", "tokens")}
        return {
            **plain,
            "reward": self.reward.to_json(),
            "pass_at": {str(k): estimate.to_json() for k, estimate in self.pass_at.items()},
            "greedy": None if self.greedy is None else self.greedy.to_json(),
            "stops": dict(self.stops),
            "failures": dict(self.failures),
            "by": {name: {value: part.to_json() for value, part in parts.items()} for name, parts in self.by.items()},
        }

    def __rich__(self) -> Group:
        """A table of all figures, one table per column with a row per value, and the counts."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        def build_table(first: str | Text, *others: str) -> Table:
            table = Table(box=None, header_style="dim", padding=(0, 2, 1, 0), collapse_padding=True)
            table.add_column(first)
            for title in others:
                table.add_column(title, justify="right", no_wrap=True)
            return table

        estimates = self._estimates()
        figures = build_table("", "mean", f"{CONFIDENCE:.0%} interval")
        for name, estimate in estimates.items():
            figures.add_row(name, estimate.mean_text, estimate.interval)
        figures.add_row("turns", f"{self.turns:.1f}")
        figures.add_row("calls", f"{self.calls:.1f}")
        figures.add_row("tokens", f"{self.tokens:.0f}" if self.tokens else "–")
        tables = [figures]
        for column, parts in self.by.items():
            titles = ("tasks", "reward", "interval", *list(estimates)[1:], "unscored")
            table = build_table(Text(sanitize(column)), *titles)
            for value, part in parts.items():
                reward, *shares = part._estimates().values()
                figures_of_part = (reward.mean_text, reward.interval, *(share.mean_text for share in shares))
                table.add_row(Text(sanitize(value)), str(part.tasks), *figures_of_part, str(part.unscored))
            tables.append(table)
        stops = ", ".join(f"{name} {count}" for name, count in self.stops.items())
        greedy = "" if self.greedy is None else f" ({self.tasks} of them greedy)"
        counts = f"{self.tasks} tasks, {self.chains} chains{greedy}, {self.unscored} unscored; ends: {stops}"
        return Group(*tables, counts)

    def _estimates(self) -> dict[str, Estimate]:
        shares = {f"pass@{k}": estimate for k, estimate in self.pass_at.items()}
        return {"reward": self.reward, **shares, **({} if self.greedy is None else {"greedy": self.greedy})}


def summarize(
    tasks: Sequence[Task],
    results: Sequence[ChainResult],
    *,
    chains: int,
    threshold: float,
    zero: bool,
    by: Sequence[str],
) -> Evaluation:
    """Compute the figures of results, in all and by the values of the columns `by`.

    chains: sampled chains per task. threshold: reward from which a chain is a success. zero: a chain without a reward
    counts as reward 0; otherwise it is left out.
    """

    def numbers_first(value: str) -> tuple[float, str]:
        """Sort key: numbers by size, then other text."""
        try:
            number = float(value)
        except ValueError:
            number = math.inf
        return math.inf if math.isnan(number) else number, value

    whole = _compute_figures(results, chains, threshold, zero=zero)
    columns: dict[str, dict[str, Evaluation]] = {}
    for column in by:
        values: dict[str, list[ChainResult]] = {}
        for result in results:
            value = tasks[result.group].columns.get(column, "–")
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            values.setdefault(text, []).append(result)
        columns[column] = {
            value: _compute_figures(values[value], chains, threshold, zero=zero)
            for value in sorted(values, key=numbers_first)
        }
    return replace(whole, by=columns)


def _compute_figures(results: Sequence[ChainResult], chains: int, threshold: float, *, zero: bool) -> Evaluation:
    def rewards_by_task(chosen: Sequence[ChainResult]) -> list[list[float]]:
        """The rewards of each task; tasks without any are left out."""
        groups: dict[int, list[float]] = {}
        for result in chosen:
            if result.reward is not None or zero:
                groups.setdefault(result.group, []).append(result.reward or 0.0)
        return list(groups.values())

    def estimate_pass(k: int, groups: Sequence[Sequence[float]]) -> Estimate:
        solved = [(len(rewards), sum(reward >= threshold for reward in rewards)) for rewards in groups]
        return Estimate.from_proportions([pass_at_k(k, n, good) for n, good in solved if n >= k], chains)

    sampled = [result for result in results if not result.greedy]
    groups = rewards_by_task(sampled)
    means = [fmean(rewards) for rewards in groups]
    binary = all(reward in (0.0, 1.0) for rewards in groups for reward in rewards)
    greedy = rewards_by_task([result for result in results if result.greedy])
    failures = Counter(result.failure for result in results if result.failure is not None)
    return Evaluation(
        tasks=len({result.group for result in results}),
        chains=len(results),
        unscored=sum(result.reward is None for result in results),
        reward=Estimate.from_proportions(means, chains) if binary else Estimate.from_values(means),
        pass_at={1 << power: estimate_pass(1 << power, groups) for power in range(chains.bit_length())},
        greedy=estimate_pass(1, greedy) if len(sampled) < len(results) else None,
        turns=fmean(result.turns for result in sampled),
        calls=fmean(result.calls for result in sampled),
        tokens=fmean(result.tokens for result in sampled),
        stops=dict(Counter(result.stop for result in results).most_common()),
        failures=dict(failures.most_common()),
    )
