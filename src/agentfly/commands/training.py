"""What `agentfly train` does: a recipe with its changes, or a run that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from agentfly.commands.loading import load, make_agent
from agentfly.commands.running import refuse_without_torch
from agentfly.errors import ConfigError
from agentfly.rollout.options import tasks_of
from agentfly.runs import RunDirectory
from agentfly.training.config import TrainConfig, parse_overrides, refuse_wrong_fields
from agentfly.training.data import read_tasks
from agentfly.types import Task

SHOWN = 40
"""Characters of a value that are printed; the run's config.json has them all."""


def trained(recipe: Path, changes: Sequence[str], folder: Path | None) -> None:
    """Train what a recipe describes, with some fields changed, in a folder of its own."""
    refuse_without_torch("train")
    overrides = parse_overrides(changes)
    refuse_wrong_fields(overrides)  # before the recipe draws its tasks, and before torch is imported
    from agentfly.training.setup import new_run

    plan = planned(recipe, overrides)
    place = folder or _free(Path("runs"), recipe.stem)
    try:
        trainer = new_run(plan, place, {"recipe": str(recipe.resolve()), "overrides": overrides})
    except BaseException:
        if folder is None:
            with contextlib.suppress(OSError):  # something lies in it
                place.rmdir()
        raise
    _train(trainer, place)


def resumed(folder: Path, from_step: int | None) -> None:
    """Go on with a run where it was stopped, by whatever."""
    refuse_without_torch("train")
    from agentfly.training.setup import resumed_run

    run = RunDirectory(folder)
    kept = run.config
    if "recipe" not in kept:
        raise ConfigError(f"the run in {folder} was not started from a recipe: resume it from the program that did")
    original = Path(kept["recipe"])
    plan = planned(_recipe(folder, original), kept.get("overrides", {}), original.parent)
    if run.report.exists() and from_step is None:
        Console().print(f"the run in {folder} is finished: see {run.report}", highlight=False, markup=False)
        return
    _train(resumed_run(plan, folder, from_step), folder)


def planned(recipe: Path, overrides: Mapping[str, Any], beside: Path | None = None) -> Any:
    """The plan of a recipe: `agent` as a function, `tasks`, `config`, and perhaps `eval_tasks`.

    Files that it names lie `beside` it; None: in its own folder.
    """
    module = load(recipe, "recipe")
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"{recipe} must define `config`: a TrainConfig, from agentfly.training")
    config = config.overridden(overrides)
    tasks, held_out = (_tasks(beside or recipe.parent, getattr(module, name, ())) for name in ("tasks", "eval_tasks"))
    from agentfly.training.trainer import Plan

    return Plan(partial(make_agent, module), tasks, config, held_out, recipe)


def _tasks(folder: Path, given: Any) -> list[Task]:
    if isinstance(given, str | Path):
        return read_tasks(folder / given)
    return tasks_of(given) if given else []


def _train(trainer: Any, folder: Path) -> None:
    from agentfly.training import loop

    console = Console()
    console.print(_table(trainer.config))
    try:
        asyncio.run(loop.run(trainer))
    except KeyboardInterrupt:
        console.print(f"stopped; go on with: agentfly train --resume {folder}", highlight=False, markup=False)
        raise SystemExit(130) from None
    console.print(f"see {folder / 'report.html'} and {folder / 'reward.png'}", highlight=False, markup=False)


def _table(config: TrainConfig) -> Columns:
    """The configuration in effect; what differs from the default stands out."""
    default = TrainConfig().to_json()
    fields = config.to_json().items()
    return Columns(
        [Text(f"{name}={_short(value)}", "bold" if value != default[name] else "dim") for name, value in fields],
        padding=(0, 3),
        column_first=True,
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _recipe(folder: Path, original: Path) -> Path:
    """The file the run was started from, which may stand beside others it needs; unless it was changed since."""
    copy = folder / "recipe.py"
    if not copy.is_file():
        raise ConfigError(
            f"the run in {folder} has no recipe.py, the copy of the recipe that it was started from ({original}): "
            "put the recipe there as it was then, or start another run"
        )
    if original.is_file() and original.read_bytes() == copy.read_bytes():
        return original
    Console().print(f"{original} was changed since: going on with {copy}", highlight=False, markup=False)
    return copy


def _free(folder: Path, name: str) -> Path:
    """The next free place for a run, taken at once: another run may be looking for one too."""
    number = 1
    while True:
        place = folder / f"{name}-{number}"
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return place
