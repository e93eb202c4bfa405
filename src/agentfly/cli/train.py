"""Work of `agentfly train`: train a recipe with overrides, or resume a run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from agentfly.cli.console import print_text
from agentfly.cli.recipes import Recipe
from agentfly.cli.resolve import allow_imports_from, load_module, make_agent
from agentfly.cli.run import require_torch
from agentfly.data import read_tasks
from agentfly.errors import ConfigError
from agentfly.integrations.verl.config import ClusterConfig
from agentfly.rollout.config import parse_tasks
from agentfly.runs import RunDirectory
from agentfly.training.config import TrainConfig, parse_overrides, validate_overrides
from agentfly.training.config_records import WarmStart
from agentfly.training.launch import is_torchrun_rank, launch_or_join_ranks
from agentfly.training.plan import TrainPlan
from agentfly.types import Task

COMMAND = ("-m", "agentfly", *sys.argv[1:])
"""Starts this command in another process."""
_RESUME = "agentfly train --resume"
MAX_VALUE_LENGTH = 40
"""Maximum number of characters printed per value; config.json has them all."""


def train_recipe(
    recipe: Recipe,
    changes: Sequence[str],
    folder: Path | None,
    on: str | None = None,
    *,
    warm_start: bool = False,
) -> None:
    """Train a recipe with config overrides, in a new run directory.

    on: system to train on; None is this process. warm_start: run the SFT that the recipe declares first.
    """
    require_torch("train")
    if on not in (None, "verl"):
        raise ConfigError(f"--on {on}: there is no such system to train on; write --on verl, or leave it out")
    overrides = parse_overrides(changes)
    allow_imports_from(recipe.path.parent)  # loggers=module:Class may name a module beside the recipe
    changes_of_config = overrides if on is None else ClusterConfig.split(overrides)[1]
    validate_overrides(changes_of_config)  # before the recipe draws its tasks, SFT runs, and torch is imported
    command: tuple[str, ...] = COMMAND
    if warm_start:
        if on is not None:
            from agentfly.integrations.verl.launch import require_verl

            require_verl()
        model = f"model={_run_warm_start(recipe, changes_of_config)}"
        overrides |= parse_overrides([model])
        command = (*(word for word in COMMAND if word != "--warm-start"), model)  # other ranks do not repeat the SFT
    if on is not None:
        _train_on_verl(recipe, overrides, folder)
        return
    console = Console()
    print_text(console, f"reading {recipe.path}")
    plan = plan_recipe(recipe, overrides)
    _require_warm_start(recipe, overrides, plan)
    if launch_or_join_ranks(plan.config, command):
        return
    tasks = f"{len(plan.tasks)} tasks, {len(plan.eval_tasks)} held out"
    print_text(console, f"{tasks}; loading {plan.config.model}")
    from agentfly.training.trainer import Trainer

    metadata = {"recipe": str(recipe.path.resolve()), "overrides": overrides}
    with _claim_folder(folder, recipe.name) as run_folder:
        trainer = Trainer.create(plan, run_folder, metadata=metadata)
        with _report_run(trainer.config, run_folder, str(trainer.memory)):
            asyncio.run(trainer.run())


def resume_run(folder: Path, from_step: int | None, changes: Sequence[str] = ()) -> None:
    """Resume a run from its newest checkpoint, or from `from_step`; overrides change fields that are safe to change."""
    require_torch("train")
    new = parse_overrides(changes)
    run = RunDirectory(folder)
    stored = run.config
    on_verl = stored.get("on") == "verl"
    if "recipe" not in stored:
        raise ConfigError(f"the run in {folder} was not started from a recipe: resume it from the program that did")
    original = Path(stored["recipe"])
    allow_imports_from(original.parent)
    validate_overrides(ClusterConfig.split(new)[1] if on_verl else new)
    recipe = Recipe(_find_recipe(folder, original))
    overrides = {**stored.get("overrides", {}), **new}
    done = max((record.step for record in run.records()), default=0)
    finished = run.report.exists() and done >= stored.get("steps", math.inf)
    if finished and from_step is None and not new:
        text = f"the run in {folder} is finished: see {run.report}; {_RESUME} {folder} steps={2 * done} trains on"
        print_text(Console(), text)
        return
    if on_verl:
        from agentfly.integrations.verl.launch import describe_cluster, require_verl, train_on_verl

        require_verl()
        cluster, changes_of_config = ClusterConfig.split(overrides)
        make_plan = partial(plan_recipe, recipe, changes_of_config, original.parent)
        with _report_run(make_plan().config, folder, describe_cluster(cluster)):
            metadata = {"overrides": overrides}
            train_on_verl(make_plan, cluster, folder, metadata=metadata, resume=True, from_step=from_step)
        return
    print_text(Console(), f"reading {recipe.path}")
    plan = plan_recipe(recipe, overrides, original.parent)
    if launch_or_join_ranks(plan.config, COMMAND, resumed=True):
        return
    from agentfly.training.trainer import Trainer

    trainer = Trainer.resume(plan, folder, metadata={"overrides": overrides}, from_step=from_step)
    with _report_run(trainer.config, folder, str(trainer.memory)):
        asyncio.run(trainer.run())


def _train_on_verl(recipe: Recipe, overrides: Mapping[str, Any], folder: Path | None) -> None:
    """Train on a Ray cluster; the overrides contain those of the cluster."""
    cluster, changes_of_config = ClusterConfig.split(overrides)
    from agentfly.integrations.verl.launch import describe_cluster, require_verl, train_on_verl

    require_verl()
    recipe = replace(recipe, path=recipe.path.resolve())  # read again by processes with another working directory
    metadata = {"recipe": str(recipe.path), "overrides": overrides}
    make_plan = partial(plan_recipe, recipe, changes_of_config)
    plan = make_plan()
    config = plan.config
    _require_warm_start(recipe, changes_of_config, plan)
    with _claim_folder(folder, recipe.name) as run_folder, _report_run(config, run_folder, describe_cluster(cluster)):
        train_on_verl(make_plan, cluster, run_folder, metadata=metadata)


def _require_warm_start(recipe: Recipe, overrides: Mapping[str, Any], plan: TrainPlan) -> None:
    """Raise ConfigError where a recipe needs a warm start and the command line gives no model."""
    if "model" not in overrides and (problem := recipe.explain_warm_start(plan.warm_start, plan.config.model)):
        raise ConfigError(problem)


def _run_warm_start(recipe: Recipe, overrides: Mapping[str, Any]) -> str:
    """Run the SFT that the recipe declares and return the folder of its model."""
    settings = plan_recipe(recipe, overrides).warm_start  # refuses a wrong configuration before SFT has run for it
    if settings is None:
        raise ConfigError(f"--warm-start: {recipe.path} declares no `warm_start`; leave --warm-start out")
    if "model" in overrides:
        raise ConfigError(f"--warm-start trains {settings.model!r} first: give it or model=, not both")
    if is_torchrun_rank():
        raise ConfigError("--warm-start runs SFT in one process: run `agentfly sft` before torchrun, and give model=")
    if (model_folder := Path(settings.trained_model)).exists():
        raise ConfigError(
            f"--warm-start writes {model_folder}, which exists already: train it with "
            f"model={model_folder}, or move it away"
        )
    # Another process: it gives the memory of its engine and its model back.
    process = subprocess.run([sys.executable, "-m", "agentfly", *settings.sft_arguments(recipe.argument)])
    if process.returncode:
        raise SystemExit(process.returncode)
    return settings.trained_model


def plan_recipe(recipe: Recipe, overrides: Mapping[str, Any], beside: Path | None = None) -> TrainPlan:
    """The plan of a recipe: `agent` as a function, `tasks`, `config`, and perhaps `eval_tasks`.

    Files that it names lie `beside` it; None: in its own folder.
    """
    path = recipe.path
    module = load_module(path, "recipe", recipe.installed_as)
    config = getattr(module, "config", None)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"{path} must define `config`: a TrainConfig, from agentfly.training")
    warm_start = getattr(module, "warm_start", None)
    if not isinstance(warm_start, WarmStart | None):
        raise ConfigError(f"{path}: `warm_start` is a WarmStart(expert=…, steps=…), from agentfly.training")
    config = config.override(overrides)
    tasks: dict[str, list[Task]] = {}
    for name in ("tasks", "eval_tasks"):
        rows = getattr(module, name, ())
        if isinstance(rows, str | Path):
            tasks[name] = read_tasks((beside or path.parent) / rows)
        else:
            tasks[name] = parse_tasks(rows) if rows else []
    return TrainPlan(partial(make_agent, module), config=config, recipe=path, warm_start=warm_start, **tasks)


@contextlib.contextmanager
def _report_run(config: TrainConfig, folder: Path, memory: str) -> Iterator[None]:
    """Print the size of a run, the fields that differ from their defaults and the memory plan; then where to look."""
    default = TrainConfig().flat()
    console = Console()
    chains = f"{config.steps} steps × {config.tasks_per_step} tasks × {config.num_chains} chains"
    print_text(console, f"{chains}; each chain has {config.chain_settings().describe_limits()}")
    fields = []
    for name, value in config.flat().items():
        if value != default[name]:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            fields.append(
                f"{name}={text}" if len(text) <= MAX_VALUE_LENGTH else f"{name}={text[: MAX_VALUE_LENGTH - 1]}…"
            )
    console.print(Columns(map(Text, fields), padding=(0, 3), column_first=True))
    print_text(console, f"all fields: {folder / 'config.json'}")
    print_text(console, memory)
    if (warmup := config.optimizer.warmup_steps) > config.steps:
        text = f"optimizer.warmup_steps={warmup} of the recipe is longer than steps={config.steps}"
        print_text(console, f"{text}: the learning rate reaches {config.steps / warmup:.0%} of its peak")
    if (warmup := config.optimizer.critic_warmup_steps) >= config.steps:
        text = f"optimizer.critic_warmup_steps={warmup} of the recipe leaves none of steps={config.steps} to the policy"
        print_text(console, f"{text}: it is not updated")
    try:
        yield
    except KeyboardInterrupt:
        if not (folder / "config.json").exists():
            raise  # on verl, before the run was created
        done = max((record.step for record in RunDirectory(folder).records()), default=0)
        text = f"stopped after step {done} of {config.steps}; resume with: {_RESUME} {folder}"
        if done == config.steps:
            text = (
                f"stopped after the last step: its model is in {folder / 'checkpoints'}; `agentfly eval` evaluates it"
            )
        print_text(console, text)
        raise SystemExit(130) from None
    for model in sorted(folder.glob("checkpoints/step-*/model"))[-1:]:
        print_text(console, f"model: {model}")
    print_text(
        console, f"see {folder / 'report.html'} and {folder / 'reward.png'}; `agentfly view {folder}` shows the chains"
    )


def _find_recipe(folder: Path, original: Path) -> Path:
    """Return the original recipe file, next to files it may need; the run's copy if the original has changed."""
    copy = folder / "recipe.py"
    if not copy.is_file():
        raise ConfigError(
            f"the run in {folder} has no recipe.py, the copy of the recipe that it was started from ({original}): "
            "put the recipe there as it was then, or start another run"
        )
    if original.is_file() and original.read_bytes() == copy.read_bytes():
        return original
    print_text(Console(), f"{original} has changed since: using {copy}")
    return copy


@contextlib.contextmanager
def _claim_folder(folder: Path | None, name: str) -> Iterator[Path]:
    """The given run directory; None: the next free one in runs/. Creating it claims it against concurrent runs.

    After an error, a directory that was created and is still empty is removed.
    """
    if folder is not None:
        yield folder
        return
    for number in itertools.count(1):
        candidate = Path("runs", f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir(parents=True)
            break
    try:
        yield candidate
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty
            candidate.rmdir()
        raise
