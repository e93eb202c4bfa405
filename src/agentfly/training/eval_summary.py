"""The figures of an evaluation: what they are, how they are made of chains, and how they are shown."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agentfly.runs.record import EvalFigures
from agentfly.runs.words import sanitize
from agentfly.training.estimate import CONFIDENCE, Estimate, pass_at
from agentfly.training.eval_log import Result
from agentfly.types import Task

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The figures of an evaluation, or of the part of it whose tasks share a value in a column."""

    tasks: int
    chains: int
    """In all, greedy ones not counted."""
    unscored: int
    """Chains that have no reward, greedy ones included."""
    reward: Estimate
    pass_at: Mapping[int, Estimate]
    """By k: the share of tasks that one of k chains solves. That of k = 1 is the share of chains that succeed."""
    greedy: Estimate | None
    """The share of tasks that a greedy chain solves; None where none was asked for."""
    turns: float
    calls: float
    tokens: float
    """Sampled tokens of a chain, in the mean; 0 where the server returns no ids to count."""
    stops: Mapping[str, int]
    """Chains by why they ended, greedy ones included."""
    failures: Mapping[str, int]
    """What broke last in chains that failed or have no reward, and in how many."""
    by: Mapping[str, Mapping[str, Evaluation]] = field(default_factory=dict)
    """By column and value, the same for the tasks that have it."""

    @property
    def success(self) -> Estimate:
        """The share of chains whose reward reaches the threshold."""
        return self.pass_at[1]

    @property
    def figures(self) -> EvalFigures:
        """As a training run keeps it."""
        metrics = {f"pass@{k}": each.mean for k, each in self.pass_at.items()}
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
        """Everything, with each estimate as mean, low and high."""
        known = {name: getattr(self, name) for name in ("tasks", "chains", "unscored", "turns", "calls", "tokens")}
        return {
            **known,
            "reward": self.reward.to_json(),
            "pass_at": {str(k): each.to_json() for k, each in self.pass_at.items()},
            "greedy": None if self.greedy is None else self.greedy.to_json(),
            "stops": dict(self.stops),
            "failures": dict(self.failures),
            "by": {name: {value: part.to_json() for value, part in parts.items()} for name, parts in self.by.items()},
        }

    def __rich__(self) -> Group:
        from rich.console import Group

        ends = ", ".join(f"{name} {count}" for name, count in self.stops.items())
        said = f"{self.tasks} tasks, {self.chains} chains, {self.unscored} of them unscored; ends: {ends}"
        return Group(self._whole(), *(self._parts(column) for column in self.by), said)

    def _whole(self) -> Table:
        """A line a figure."""
        table = _table("", "mean", f"{CONFIDENCE:.0%} interval")
        for name, each in self._estimates().items():
            table.add_row(name, each.shown, each.interval)
        table.add_row("turns", f"{self.turns:.1f}")
        table.add_row("calls", f"{self.calls:.1f}")
        table.add_row("tokens", f"{self.tokens:.0f}" if self.tokens else "–")
        return table

    def _parts(self, column: str) -> Table:
        """A line a value of the column."""
        from rich.text import Text

        table = _table(Text(sanitize(column)), "tasks", "reward", "interval", *list(self._estimates())[1:], "unscored")
        for value, part in self.by[column].items():
            reward, *shares = part._estimates().values()
            means = (share.shown for share in shares)
            table.add_row(
                Text(sanitize(value)), str(part.tasks), reward.shown, reward.interval, *means, str(part.unscored)
            )
        return table

    def _estimates(self) -> dict[str, Estimate]:
        shares = {f"pass@{k}": each for k, each in self.pass_at.items()}
        return {"reward": self.reward, **shares, **({} if self.greedy is None else {"greedy": self.greedy})}


def _table(first: str | Text, *others: str) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 1, 0), collapse_padding=True)
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table


@dataclass(frozen=True, slots=True)
class Summary:
    """How figures are made of results."""

    chains: int
    threshold: float
    zero: bool
    """Whether a chain without a reward counts as one that earned 0."""

    def with_columns(self, tasks: Sequence[Task], results: Sequence[Result], by: Sequence[str]) -> Evaluation:
        columns: dict[str, dict[str, Evaluation]] = {}
        for column in by:
            values: dict[str, list[Result]] = {}
            for result in results:
                values.setdefault(_value(tasks[result.group], column), []).append(result)
            columns[column] = {value: self.of(values[value]) for value in sorted(values, key=_order)}
        return replace(self.of(results), by=columns)

    def of(self, results: Sequence[Result]) -> Evaluation:
        sampled = [each for each in results if not each.greedy]
        groups = self._groups(sampled)
        means = [fmean(rewards) for rewards in groups]
        binary = all(reward in (0.0, 1.0) for rewards in groups for reward in rewards)
        greedy = self._groups([each for each in results if each.greedy])
        broken = Counter(each.failure for each in results if each.failure is not None)
        return Evaluation(
            tasks=len({each.group for each in results}),
            chains=len(sampled),
            unscored=sum(each.reward is None for each in results),
            reward=Estimate.of_share(means, self.chains) if binary else Estimate.of(means),
            pass_at={k: self._pass_at(k, groups) for k in _powers(self.chains)},
            greedy=self._pass_at(1, greedy) if len(sampled) < len(results) else None,
            turns=fmean(each.turns for each in sampled),
            calls=fmean(each.calls for each in sampled),
            tokens=fmean(each.tokens for each in sampled),
            stops=dict(Counter(each.stop for each in results).most_common()),
            failures=dict(broken.most_common()),
        )

    def _groups(self, results: Sequence[Result]) -> list[list[float]]:
        """The rewards of each task; tasks without any are left out."""
        groups: dict[int, list[float]] = {}
        for each in results:
            if each.reward is not None or self.zero:
                groups.setdefault(each.group, []).append(each.reward or 0.0)
        return list(groups.values())

    def _pass_at(self, k: int, groups: Sequence[Sequence[float]]) -> Estimate:
        solved = [(len(rewards), sum(reward >= self.threshold for reward in rewards)) for rewards in groups]
        return Estimate.of_share([pass_at(k, count, good) for count, good in solved if count >= k], self.chains)


def _powers(chains: int) -> list[int]:
    """1, 2, 4 and so on, as far as there are chains."""
    return [1 << power for power in range(chains.bit_length())]


def _value(task: Task, column: str) -> str:
    value = task.columns.get(column, "–")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _order(value: str) -> tuple[float, str]:
    """Numbers by size, then words."""
    try:
        number = float(value)
    except ValueError:
        number = math.inf
    return math.inf if math.isnan(number) else number, value
