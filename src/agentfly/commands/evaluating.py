"""What `agentfly eval` does: the figures of an agent on held-out tasks, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from agentfly.commands.console import harmless
from agentfly.commands.progress import Steps
from agentfly.commands.running import Run
from agentfly.errors import ConfigError
from agentfly.rollout.options import sampling_of, settings_of
from agentfly.runs.files import replace
from agentfly.training.evaluation import Evaluation, evaluate, refuse_wrong_numbers

FILE = "chains.jsonl"
SUMMARY = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Asked:
    """What to make of the chains."""

    greedy: bool = False
    threshold: float = 1.0
    unscored: Literal["zero", "leave out"] = "zero"
    by: Sequence[str] = ()
    out: Path | None = None
    """Where finished chains go: a file of lines, or a folder that also gets the figures."""


def evaluated(run: Run, asked: Asked, *, as_json: bool = False) -> Evaluation:
    """Evaluate, showing how far it is on standard error, and print what came out."""
    progress = Console(stderr=True)
    log, summary = _places(asked.out)
    if log is not None and log.exists():
        progress.print(f"going on with {log}", highlight=False, markup=False)
    found = asyncio.run(_figures(run, asked, log, progress))
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), ensure_ascii=False) + "\n")
    else:
        Console().print(found)
        for failure, count in list(found.failures.items())[:5]:
            Console().print(harmless(Text(f"{count} × {failure}", "red")))
    if summary is not None:
        replace(summary, json.dumps(found.to_json(), indent=1, ensure_ascii=False).encode("utf-8", "backslashreplace"))
    return found


def refuse_wrong_flags(asked: Asked, sampling: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse flags that are wrong whatever the recipe is, before it draws its tasks; None stands for one not given."""
    chains = options.get("num_chains")
    refuse_wrong_numbers(1 if chains is None else chains, options.get("max_concurrent_chains"), asked.unscored)
    sampling_of({name: value for name, value in sampling.items() if value is not None})
    turns = options.get("max_turns")
    settings_of(1 if turns is None else turns, {"seed": options.get("seed")})
    _places(asked.out)


async def _figures(run: Run, asked: Asked, log: Path | None, console: Console) -> Evaluation:
    options = dict(run.options)
    chains = options.pop("num_chains", 1)
    rewards: list[float] = []
    try:
        with Steps(console, "chains", len(run.tasks) * (chains + asked.greedy)) as steps:

            def watch(result: Any) -> None:
                rewards.append(result.reward or 0.0)
                steps.advance(f"reward {sum(rewards) / len(rewards):.3f}")

            return await evaluate(
                run.agent, list(run.tasks), chains=chains, greedy=asked.greedy, threshold=asked.threshold,
                unscored=asked.unscored, by=asked.by, log=log, watcher=watch, **options,
            )  # fmt: skip
    finally:
        await run.agent.close()


def _places(out: Path | None) -> tuple[Path | None, Path | None]:
    """Where the chains go, and where the figures."""
    if out is None:
        return None, None
    if out.is_dir() or not out.suffix:
        return out / FILE, out / SUMMARY
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: give a folder, or a file whose name ends with .jsonl")
    return out, None


def nothing_came_of(found: Evaluation) -> bool:
    """Whether not one chain could be scored."""
    return sum(found.stops.values()) == found.unscored
