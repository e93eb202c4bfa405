"""Runs an evaluation: how well an agent does on tasks it was not trained on; its log makes it resumable.

Every requested chain enters every figure. A chain that could not be scored, because its environment or its server
failed, counts as a reward of 0, or is left out where that is requested; either way it is counted and shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, Unpack

from agentfly.agent import BaseAgent
from agentfly.errors import ConfigError, DataError, RecordError
from agentfly.evaluation.summary import ChainResult, Evaluation, summarize
from agentfly.rollout.config import ChainSettings, RunOptions, parse_sampling, parse_settings, parse_tasks
from agentfly.rollout.scheduler import ChainJob, run_chains
from agentfly.runs.files import append_lines, explain_write_error, lock_file
from agentfly.runs.summary import ChainSummary
from agentfly.trajectory import Trajectory
from agentfly.types import Task
from agentfly.validation import PositiveInt, validate


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
    on_result: Callable[[ChainResult], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
    **options: Unpack[RunOptions],
) -> Evaluation:
    """Run `chains` chains of each task and compute the figures.

    greedy: add one chain per task at temperature 0. threshold: reward from which a chain is a success.
    unscored: how a chain without a reward counts. by: columns whose values get figures of their own.
    log: file of finished chains; an evaluation with an existing log runs the missing chains, and again those that were
    not scored. on_result: called with every finished chain, those of the log first. on_trajectory: called with every
    chain that was run now.
    options: those of `agent.run`; the seed is 0 unless given, so that two models are sampled with the same seeds.
    """
    all_tasks = parse_tasks(tasks)
    columns = (by,) if isinstance(by, str) else by
    max_concurrent = options.get("max_concurrent_chains")
    validate_counts(chains, max_concurrent, unscored)
    if agent.scorer is None:
        raise ConfigError("this agent has no reward, so it cannot be evaluated; give it reward=…")
    known_columns = {name for task in all_tasks for name in task.columns}
    for column in columns:
        if column not in known_columns:
            names = ", ".join(sorted(known_columns)) or "none"
            raise ConfigError(f"by {column!r}: no task has such a column; there are {names}")
    if options.get("seed") is None and parse_sampling(options.get("sampling")).seed is None:
        options["seed"] = 0
    settings = parse_settings(max_turns, options)
    if settings.branching is not None:
        raise ConfigError("an evaluation runs independent chains: leave branching out")
    plan = dict.fromkeys(range(chains), settings)
    if greedy:
        if settings.sampling.temperature == 0:
            raise ConfigError("greedy chains were requested, but at temperature 0 every chain is greedy; drop one")
        plan[chains] = replace(settings, sampling=replace(settings.sampling, temperature=0.0))
    # The first tasks are sampled first: an evaluation that is stopped has finished most of what it sampled.
    jobs = [
        ChainJob(task, group, chain, replace(chain_settings, priority=group))
        for group, task in enumerate(all_tasks)
        for chain, chain_settings in plan.items()
    ]
    opened: nullcontext[None] | EvalLog = nullcontext()
    if log is not None:
        opened = EvalLog(log, _evaluation_identity(agent, all_tasks, settings, chains=chains, greedy=greedy))
    with opened as eval_log:
        results = {} if eval_log is None else {k: r for k, r in eval_log.results.items() if r.reward is not None}
        for result in results.values():
            if on_result is not None:
                on_result(result)
        missing = [job for job in jobs if (job.group, job.chain) not in results]
        running = run_chains(agent, missing, max_concurrent_chains=max_concurrent, manager=agent.manager)
        async with aclosing(running) as finished:
            async for trajectory in finished:
                if trajectory.score is None:
                    # Stop if an environment cannot start until something is installed: no chain would be scored.
                    for pool in agent.manager.pool_metrics():
                        if pool.misconfigured:
                            raise ConfigError(pool.broken)
                result = ChainResult.from_trajectory(trajectory, greedy=trajectory.chain >= chains)
                results[result.key] = result
                if eval_log is not None:
                    eval_log.add(result, trajectory)
                if on_result is not None:
                    on_result(result)
                if on_trajectory is not None:
                    on_trajectory(trajectory)
    ordered = [results[key] for key in sorted(results)]
    return summarize(all_tasks, ordered, chains=chains, threshold=threshold, zero=unscored == "zero", by=columns)


def validate_counts(chains: int, max_concurrent: int | None, unscored: str) -> None:
    """Refuse counts that are not positive integers, and unknown values of `unscored`."""
    validate("chains", chains, PositiveInt)
    validate("max_concurrent_chains", max_concurrent, PositiveInt | None)
    if unscored not in ("zero", "leave out"):
        raise ConfigError(f"unscored is 'zero' or 'leave out', not {unscored!r}")


def _evaluation_identity(
    agent: BaseAgent, tasks: Sequence[Task], settings: ChainSettings, *, chains: int, greedy: bool
) -> dict[str, Any]:
    """The settings that two evaluations must share to be merged in one log."""
    assert agent.scorer is not None
    rows = [[[m.to_dict() for m in task.messages], dict(task.columns)] for task in tasks]
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode())
    folding = settings.folding
    identity = {
        "agent": type(agent).__name__,
        "model": agent.backend_model,
        "backend": type(agent.backend).__name__,
        "template": None if agent.template is None else agent.template.name,
        "system_prompt": agent.system_prompt,
        "tools": agent.toolbox.names,
        "rewards": [[scorer.name, weight] for scorer, weight in agent.scorer.rewards],
        "tasks": f"{len(tasks)} ({digest.hexdigest()[:12]})",
        "chains": chains,
        "greedy": greedy,
        **asdict(settings.sampling),
        **asdict(settings.limits),
        "seed": settings.seed,
        "failures": repr(settings.failures),
        "folding": repr(folding) if is_dataclass(folding) else type(folding).__name__,
    }
    as_json: dict[str, Any] = json.loads(json.dumps(identity, default=str))
    return as_json


class EvalLog:
    """The finished chains of an evaluation on disk, one JSON line each, so that a killed evaluation can resume.

    The first line holds the settings, which must be the same on resume: chains of two settings have no common mean.
    One process at a time holds the file; close it, or use `with`.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Create the file, or open an existing one that has the same settings."""
        self.path = path
        with explain_write_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        try:
            try:
                lock_file(self._file)
            except OSError as error:
                raise ConfigError(f"{path} is being written by another evaluation; let it end first") from error
            self.results = self._read(settings)
        except BaseException:
            self._file.close()
            raise

    def add(self, result: ChainResult, trajectory: Trajectory) -> None:
        """Append a finished chain; where JSON cannot hold its trajectory, the figures and the reason."""
        line: dict[str, Any] = {"result": asdict(result)}
        try:
            line |= {"summary": asdict(ChainSummary.of(trajectory)), "trajectory": trajectory.to_json()}
        except RecordError as error:
            line["lost"] = str(error)
        append_lines(self.path, [line])
        self.results[result.key] = result

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, settings: Mapping[str, Any]) -> dict[tuple[int, int], ChainResult]:
        """Read the finished chains; the last result counts where a chain was run more than once.

        The file is read line by line, since it may exceed memory. A line that a kill left incomplete at the end is cut
        off: the next line must not be appended to it.
        """
        results: dict[tuple[int, int], ChainResult] = {}
        self._file.seek(0)
        complete = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(complete)
                break
            complete += len(line)
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"line {number} of {self.path} is not JSON ({error}); remove it") from error
            value = value if isinstance(value, dict) else {}
            if number == 1:
                before = value.get("settings")
                if not isinstance(before, dict):
                    raise ConfigError(f"{self.path} is not an evaluation; give another file or folder")
                for name in {**before, **settings}:
                    if before.get(name) != settings.get(name):
                        raise ConfigError(
                            f"{self.path} was started with {name}={before.get(name)!r:.80}, not "
                            f"{settings.get(name)!r:.80}; give the same settings to resume it, or another file to "
                            "start a new one"
                        )
                continue
            try:
                result = ChainResult(**value["result"])
            except (KeyError, TypeError) as error:
                raise DataError(f"line {number} of {self.path} is not a finished chain: {error!r}") from error
            results[result.key] = result
        if not complete:
            append_lines(self.path, [{"settings": settings}])
        return results
