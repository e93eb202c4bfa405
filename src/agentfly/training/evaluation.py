"""Evaluation: how well an agent does on tasks it was not trained on.

Every chain that was asked for is in every figure. One that could not be scored, because its world or its server broke,
counts as a reward of 0, or is left out where that is declared; either way it is counted and shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

from agentfly.agent import BaseAgent
from agentfly.errors import ConfigError
from agentfly.rollout.chain import Settings
from agentfly.rollout.options import RunOptions, sampling_of, settings_of, tasks_of
from agentfly.rollout.scheduling import Job, run_jobs
from agentfly.training.eval_log import EvalLog, Result
from agentfly.training.eval_summary import Evaluation, Summary
from agentfly.types import Task

__all__ = ["Evaluation", "evaluate"]

Watcher = Callable[[Result], None]
"""Called with every chain that is done, those first that an earlier evaluation had finished."""


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
    refuse_wrong_numbers(chains, at_once, unscored)
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
        jobs = [Job(task, group, chain, plan[chain]) for group, task in enumerate(asked) for chain in plan]
        left = [job for job in jobs if (job.group, job.chain) not in known]
        async with aclosing(run_jobs(agent, left, max_concurrent_chains=at_once, manager=agent.manager)) as finished:
            async for trajectory in finished:
                if trajectory.score is None:
                    _refuse_misconfigured(agent)
                result = Result.of(trajectory, greedy=trajectory.chain >= chains)
                known[result.key] = result
                if kept is not None:
                    kept.add(result, trajectory)
                if watcher is not None:
                    watcher(result)
    summary = Summary(chains, threshold, unscored == "zero")
    return summary.with_columns(asked, [known[key] for key in sorted(known)], by)


def _greedy(settings: Settings) -> Settings:
    if settings.sampling.temperature == 0:
        raise ConfigError("greedy chains were asked for, but at temperature 0 every chain is greedy; drop one")
    return replace(settings, sampling=replace(settings.sampling, temperature=0.0))


def refuse_wrong_numbers(chains: int, at_once: int | None, unscored: str) -> None:
    """Refuse counts that are no counts, and another `unscored` than there is."""
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


def _refuse_misconfigured(agent: BaseAgent) -> None:
    """Stop where an environment cannot start before something is installed or configured: no chain would be scored."""
    for figures in agent.manager.figures():
        if figures.misconfigured:
            raise ConfigError(figures.broken)


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
