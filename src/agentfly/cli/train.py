"""Work of `agentfly train`: train a recipe with overrides, or resume a run."""

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

from agentfly.cli.recipes import Recipe
from agentfly.cli.resolve import load_module, make_agent
from agentfly.cli.run import require_torch
from agentfly.data import read_tasks
from agentfly.errors import ConfigError
from agentfly.rollout.config import parse_tasks
from agentfly.runs import RunDirectory
from agentfly.training.config import TrainConfig, parse_overrides, validate_overrides
from agentfly.types import Task

SHOWN = 40
"""Maximum number of characters printed per value; config.json has them all."""


def train_recipe(recipe: Recipe, changes: Sequence[str], folder: Path | None) -> None:
    """Train a recipe with config overrides, in a new run directory."""
    require_torch("train")
    overrides = parse_overrides(changes)
    validate_overrides(overrides)  # before the recipe draws its tasks, and before torch is imported
    from agentfly.training.trainer import Trainer

    plan = plan_recipe(recipe, overrides)
    place = folder or _free(Path("runs"), recipe.name)
    try:
        metadata = {"recipe": str(recipe.path.resolve()), "overrides": overrides}
        trainer = Trainer(plan, place, metadata=metadata)
    except BaseException:
        if folder is None:
            with contextlib.suppress(OSError):  # it is not empty
                place.rmdir()
        raise
    _train(trainer, place)


def resume_run(folder: Path, from_step: int | None) -> None:
    """Resume a run from its newest checkpoint, or from `from_step`."""
    require_torch("train")
    from agentfly.training.trainer import Trainer

    run = RunDirectory(folder)
    kept = run.config
    if "recipe" not in kept:
        raise ConfigError(f"the run in {folder} was not started from a recipe: resume it from the program that did")
    original = Path(kept["recipe"])
    recipe = Recipe(_recipe(folder, original))
    plan = plan_recipe(recipe, kept.get("overrides", {}), original.parent)
    if run.report.exists() and from_step is None:
        Console().print(f"the run in {folder} is finished: see {run.report}", highlight=False, markup=False)
        return
    _train(Trainer(plan, folder, resume=True, from_step=from_step), folder)


def plan_recipe(recipe: Recipe, overrides: Mapping[str, Any], beside: Path | None = None) -> Any:
    """The plan of a recipe: `agent` as a function, `tasks`, `config`, and perhaps `eval_tasks`.

    Files that it names lie `beside` it; None: in its own folder.
    """
    path = recipe.path
    module = load_module(path, "recipe", recipe.installed_as)
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"{path} must define `config`: a TrainConfig, from agentfly.training")
    config = config.override(overrides)
    tasks, held_out = (_tasks(beside or path.parent, getattr(module, name, ())) for name in ("tasks", "eval_tasks"))
    from agentfly.training.trainer import TrainPlan

    return TrainPlan(partial(make_agent, module), tasks, config, held_out, path)


def _tasks(folder: Path, given: Any) -> list[Task]:
    if isinstance(given, str | Path):
        return read_tasks(folder / given)
    return parse_tasks(given) if given else []


def _train(trainer: Any, folder: Path) -> None:
    console = Console()
    console.print(_table(trainer.config))
    try:
        asyncio.run(trainer.run())
    except KeyboardInterrupt:
        console.print(f"stopped; resume with: agentfly train --resume {folder}", highlight=False, markup=False)
        raise SystemExit(130) from None
    console.print(f"see {folder / 'report.html'} and {folder / 'reward.png'}", highlight=False, markup=False)


def _table(config: TrainConfig) -> Columns:
    """Render the configuration; values that differ from the default are bold."""
    default = TrainConfig().flat()
    fields = config.flat().items()
    return Columns(
        [Text(f"{name}={_short(value)}", "bold" if value != default[name] else "dim") for name, value in fields],
        padding=(0, 3),
        column_first=True,
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _recipe(folder: Path, original: Path) -> Path:
    """Return the original recipe file, next to files it may need; the run's copy if the original has changed."""
    copy = folder / "recipe.py"
    if not copy.is_file():
        raise ConfigError(
            f"the run in {folder} has no recipe.py, the copy of the recipe that it was started from ({original}): "
            "put the recipe there as it was then, or start another run"
        )
    if original.is_file() and original.read_bytes() == copy.read_bytes():
        return original
    Console().print(f"{original} has changed since: using {copy}", highlight=False, markup=False)
    return copy


def _free(folder: Path, name: str) -> Path:
    """Create the next free run directory; creating it claims it against concurrent runs."""
    number = 1
    while True:
        place = folder / f"{name}-{number}"
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return place
