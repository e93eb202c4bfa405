"""Evaluation: how well an agent does on tasks it was not trained on.

Every chain that was asked for is in every figure. One that could not be scored, because its world or its server broke,
counts as a reward of 0, or is left out where that is declared; either way it is counted and shown.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, Unpack

from agentfly.agent import BaseAgent
from agentfly.errors import ConfigError
from agentfly.rollout.chain import Settings
from agentfly.rollout.events import Event
from agentfly.rollout.options import RunOptions, sampling_of, settings_of, tasks_of
from agentfly.rollout.scheduling import Groups, run_chain
from agentfly.runs.record import EvalFigures
from agentfly.training.estimate import Estimate, pass_at
from agentfly.training.eval_log import EvalLog, Result
from agentfly.trajectory import Trajectory
from agentfly.types import Task

if TYPE_CHECKING:
    from rich.table import Table

Watcher = Callable[[Result], None]
"""Called with every chain that is done, those first that an earlier evaluation had finished."""


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

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("")
        titles = ["tasks", "reward", *(f"pass@{k}" for k in self.pass_at), *(["greedy"] if self.greedy else [])]
        for title in (*titles, "turns", "calls", "tokens", "unscored"):
            table.add_column(title, justify="right")
        table.add_row("all", *self._cells())
        for column, parts in self.by.items():
            for value, part in parts.items():
                table.add_row(Text(f"{column} {value}"), *part._cells())
        ends = ", ".join(f"{name} {count}" for name, count in self.stops.items())
        table.caption, table.caption_justify = f"95 % intervals over tasks · ends: {ends}", "left"
        return table

    def _cells(self) -> Iterator[str]:
        shares = [*self.pass_at.values(), *([] if self.greedy is None else [self.greedy])]
        yield from (str(self.tasks), str(self.reward), *map(str, shares))
        yield from (f"{self.turns:.1f}", f"{self.calls:.1f}", f"{self.tokens:.0f}" if self.tokens else "–")
        yield str(self.unscored)


async def evaluate(
    agent: BaseAgent,
    tasks: Any,
    *,
    chains: int = 1,
    greedy: bool = False,
    max_turns: int = 10,
    threshold: float = 1.0,
    unscored: Literal["zero", "leave out"] = "zero",
    by: str | Sequence[str] = (),
    log: Path | None = None,
    watcher: Watcher | None = None,
    **options: Unpack[RunOptions],
) -> Evaluation:
    """Run `chains` chains of each task and say how they did.

    `greedy`: one more chain of each task, at temperature 0. `threshold`: the reward from which a chain is a success.
    `unscored`: what a chain without a reward counts as. `by`: columns whose values are shown apart. `log`: a file that
    keeps finished chains; an evaluation that goes on with it runs the others, and again those that were not scored.
    `options` are those of `agent.run`; the seed is 0 unless one is given, so that two models meet the same draws.
    """
    asked = tasks_of(tasks)
    by = (by,) if isinstance(by, str) else by
    at_once = options.get("max_concurrent_chains")
    _refuse_wrong_numbers(chains, at_once, unscored)
    _refuse_what_cannot_start(agent, asked, by)
    if options.get("seed") is None and sampling_of(options.get("sampling")).seed is None:
        options["seed"] = 0
    settings = settings_of(max_turns, options)
    plan = dict.fromkeys(range(chains), settings)
    if greedy:
        plan[chains] = _greedy(settings)
    opened = nullcontext() if log is None else EvalLog(log, _said(agent, asked, chains, greedy, settings))
    with opened as kept:
        known = {} if kept is None else {key: each for key, each in kept.results.items() if each.reward is not None}
        for result in known.values():
            if watcher is not None:
                watcher(result)
        jobs = [(task, group, chain) for group, task in enumerate(asked) for chain in plan]
        left = [job for job in jobs if job[1:] not in known]
        async with aclosing(_run(agent, left, plan, at_once)) as finished:
            async for trajectory in finished:
                result = Result.of(trajectory, greedy=trajectory.chain >= chains)
                known[result.key] = result
                if kept is not None:
                    kept.add(result, trajectory)
                if watcher is not None:
                    watcher(result)
    summary = _Summary(chains, threshold, unscored == "zero")
    return summary.with_columns(asked, [known[key] for key in sorted(known)], by)


Job = tuple[Task, int, int]
"""A task, its group, and the chain's number."""


async def _run(
    agent: BaseAgent, jobs: Sequence[Job], plan: Mapping[int, Settings], at_once: int | None
) -> AsyncGenerator[Trajectory, None]:
    """The chains as they end. What a chain raises, a mistake of the user's, ends them all."""
    left = Counter(group for _, group, _ in jobs)
    groups = {group: Groups(agent.manager, count) for group, count in left.items()}
    waiting, done = iter(jobs), asyncio.Queue[Trajectory | Exception]()

    async def work() -> None:
        for task, group, chain in waiting:
            try:
                done.put_nowait(await run_chain(agent, task, group, chain, plan[chain], groups[group]))
            except Exception as error:
                done.put_nowait(error)
                return

    plan = {chain: _watched(settings, done.put_nowait) for chain, settings in plan.items()}
    workers = [asyncio.create_task(work()) for _ in range(min(len(jobs), at_once or len(jobs)))]
    try:
        for _ in jobs:
            finished = await done.get()
            if isinstance(finished, Exception):
                raise finished
            yield finished
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for group in groups.values():
            group.close()


def _watched(settings: Settings, report: Callable[[Exception], None]) -> Settings:
    """An observer that raises fails the evaluation, and never the chain it was told of."""
    observer = settings.observer
    if observer is None:
        return settings

    def observe(event: Event) -> None:
        try:
            observer(event)
        except Exception as error:
            report(error)

    return replace(settings, observer=observe)


@dataclass(frozen=True, slots=True)
class _Summary:
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


def _greedy(settings: Settings) -> Settings:
    if settings.sampling.temperature == 0:
        raise ConfigError("greedy chains were asked for, but at temperature 0 every chain is greedy; drop one")
    return replace(settings, sampling=replace(settings.sampling, temperature=0.0))


def _refuse_wrong_numbers(chains: int, at_once: int | None, unscored: str) -> None:
    for name, value in (("chains", chains), ("max_concurrent_chains", 1 if at_once is None else at_once)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, not {value!r}")
    if unscored not in ("zero", "leave out"):
        raise ConfigError(f"unscored is 'zero' or 'leave out', not {unscored!r}")


def _refuse_what_cannot_start(agent: BaseAgent, tasks: Sequence[Task], by: Sequence[str]) -> None:
    """Find out before the first token what would fail in every chain, or at the end."""
    if agent.scorer is None:
        raise ConfigError("this agent has no reward, so nothing can be said about how well it does; give it reward=…")
    there = {name for task in tasks for name in task.columns}
    for column in by:
        if column not in there:
            raise ConfigError(
                f"by {column!r}: no task has such a column; there are {', '.join(sorted(there)) or 'none'}"
            )
    for task in tasks:
        agent.scorer.check(task)
    if agent.template is not None:
        agent.template.start(agent.opening(tasks[0]))


def _said(agent: BaseAgent, tasks: Sequence[Task], chains: int, greedy: bool, settings: Settings) -> dict[str, Any]:
    """What two evaluations must have in common to be one."""
    assert agent.scorer is not None
    shown = [[[m.to_dict() for m in task.messages], dict(task.columns)] for task in tasks]
    digest = hashlib.sha256(json.dumps(shown, sort_keys=True, default=str).encode())
    folding = settings.folding
    said = {
        "agent": type(agent).__name__,
        "model": agent.model_name_or_path,
        "backend": type(agent.backend).__name__,
        "template": None if agent.template is None else agent.template.name,
        "system_prompt": agent.system_prompt,
        "tools": agent.toolbox.names,
        "rewards": [[each.name, weight] for each, weight in agent.scorer.rewards],
        "tasks": f"{len(tasks)} ({digest.hexdigest()[:12]})",
        "chains": chains,
        "greedy": greedy,
        **asdict(settings.sampling),
        **asdict(settings.limits),
        "seed": settings.seed,
        "failures": repr(settings.failures),
        "folding": repr(folding) if is_dataclass(folding) else type(folding).__name__,
    }
    kept: dict[str, Any] = json.loads(json.dumps(said, default=str))
    return kept
