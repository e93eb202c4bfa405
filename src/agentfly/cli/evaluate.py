"""Work of `agentfly eval`: evaluate an agent on held-out tasks, print a table or JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from agentfly.cli.console import print_text
from agentfly.cli.run import AgentRun
from agentfly.errors import ConfigError
from agentfly.evaluation import Evaluation, evaluate, validate_counts
from agentfly.rollout.config import parse_sampling, parse_settings
from agentfly.runs.files import write_atomic
from agentfly.runs.progress import ProgressSteps

FILE = "chains.jsonl"
SUMMARY = "evaluation.json"


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """How chains are scored, grouped and stored."""

    greedy: bool = False
    threshold: float = 1.0
    unscored: Literal["zero", "leave out"] = "zero"
    by: Sequence[str] = ()
    out: Path | None = None
    """File for finished chains, as JSON lines; or a folder, which also gets the results."""


def run_evaluation(run: AgentRun, options: EvalOptions, *, as_json: bool = False) -> Evaluation:
    """Evaluate with progress on standard error, and print the results."""
    progress = Console(stderr=True)
    model = run.agent.backend_model
    print_text(
        progress if as_json else Console(),
        f"evaluating {model} on {len(run.tasks)} tasks: {run.settings.describe_limits()}",
    )
    log, summary = _output_paths(options.out)
    if log is not None and log.exists():
        print_text(progress, f"resuming {log}")
    chains = len(run.tasks) * (run.options.get("num_chains", 1) + options.greedy)
    steps = ProgressSteps(progress, "chains", chains)
    try:
        evaluation = asyncio.run(_evaluate(run, options, log, steps))
    except KeyboardInterrupt:
        kept = "nothing is kept: --out FOLDER stores finished chains"
        if log is not None:
            kept = f"finished chains are in {log}, and the same command resumes"
        print_text(progress, f"stopped after {steps.done} of {chains} chains of {len(run.tasks)} tasks; {kept}")
        raise SystemExit(130) from None
    figures = {"model": model, **evaluation.to_json()}
    if as_json:
        sys.stdout.write(json.dumps(figures, ensure_ascii=False) + "\n")
    else:
        Console().print(evaluation)
        for failure, count in list(evaluation.failures.items())[:5]:
            print_text(Console(), f"{count} × {failure}", "red")
    if summary is not None:
        text = json.dumps(figures, indent=1, ensure_ascii=False)
        write_atomic(summary, text.encode("utf-8", "backslashreplace"))
    return evaluation


def validate_flags(options: EvalOptions, sampling: Mapping[str, Any], run_options: Mapping[str, Any]) -> None:
    """Validate the flags before the recipe is loaded; None stands for an unset flag."""
    chains = run_options.get("num_chains")
    validate_counts(1 if chains is None else chains, run_options.get("max_concurrent_chains"), options.unscored)
    parse_sampling({name: value for name, value in sampling.items() if value is not None})
    turns = run_options.get("max_turns")
    parse_settings(1 if turns is None else turns, {"seed": run_options.get("seed")})
    _output_paths(options.out)


async def _evaluate(run: AgentRun, options: EvalOptions, log: Path | None, steps: ProgressSteps) -> Evaluation:
    run_options = dict(run.options)
    chains = run_options.pop("num_chains", 1)
    rewards: list[float] = []
    try:
        with steps:

            def watch(result: Any) -> None:
                if not result.greedy:  # as in the table
                    rewards.append(result.reward or 0.0)
                steps.advance(f"reward {sum(rewards) / len(rewards):.3f}" if rewards else "reward –")

            return await evaluate(
                run.agent, list(run.tasks), chains=chains, greedy=options.greedy, threshold=options.threshold,
                unscored=options.unscored, by=options.by, log=log, on_result=watch, **run_options,
            )  # fmt: skip
    finally:
        await run.agent.close()


def _output_paths(out: Path | None) -> tuple[Path | None, Path | None]:
    """Return the paths of the chains and of the results."""
    if out is None:
        return None, None
    if out.is_dir() or not out.suffix:
        return out / FILE, out / SUMMARY
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: give a folder, or a file whose name ends with .jsonl")
    return out, None


def has_no_scores(evaluation: Evaluation) -> bool:
    """Whether no chain could be scored."""
    return evaluation.chains == evaluation.unscored
