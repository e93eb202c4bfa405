"""Work of `agentfly run`: build an agent and tasks from a recipe or flags, run them, show the chains live."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agentfly import agents
from agentfly.agent import BaseAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.cli.console import print_text, safe_text
from agentfly.cli.live_view import LiveView, describe_failure, summary_table
from agentfly.cli.recipes import Recipe
from agentfly.cli.resolve import agent_accepts, import_here, load_module, make_agent
from agentfly.data import read_tasks, save_trajectories, select
from agentfly.errors import ConfigError
from agentfly.plugins import Registry, T
from agentfly.rollout import ChainSettings, RunResult
from agentfly.rollout.config import parse_settings, parse_tasks
from agentfly.rollout.events import Event, Observer
from agentfly.rollout.limits import ChainLimits
from agentfly.rollout.waiting import report_waiting
from agentfly.scoring import REWARDS
from agentfly.tooling import TOOLS
from agentfly.training.config import TrainConfig
from agentfly.trajectory import FailureKind
from agentfly.types import Sampling, Task

AGENTS: dict[str, type[BaseAgent]] = {
    "hf": agents.HFAgent,
    "react": agents.ReactAgent,
    "code": agents.CodeAgent,
    "action": agents.ActionAgent,
    "vision": agents.VisionAgent,
}


@dataclass(frozen=True, slots=True)
class AgentRun:
    """An agent, its tasks, and the options of `BaseAgent.run`."""

    agent: BaseAgent
    tasks: tuple[Task, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> ChainSettings:
        """The options but `num_chains`, validated."""
        options: Any = {name: value for name, value in self.options.items() if name != "num_chains"}
        return parse_settings(options.pop("max_turns", ChainLimits().max_turns), options)

    def override(
        self,
        question: str | None = None,
        data: Path | None = None,
        row: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        reading: Mapping[str, Any] | None = None,
    ) -> AgentRun:
        """Return a copy with values from the command line; None keeps a value. `reading`: how `data` is read."""
        if reading and data is None:
            names = ", ".join(f"--{name}" for name in reading)
            raise ConfigError(f"{names} without a file of tasks to read: give --data")
        tasks = self.tasks
        if question is not None:
            # Arguments are UTF-8, whatever the locale.
            decoded = question.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            tasks = (Task.of(decoded, "0"),)
        elif data is not None:
            tasks = tuple(read_tasks(data, **(reading or {})))
        if not tasks:
            raise ConfigError(
                "there is nothing to run: give --data, or `tasks` in the recipe; `run` takes --question, too"
            )
        if row is not None:
            tasks = tuple(select(list(tasks), row))
        changed = drop_unset(**(sampling or {}))
        merged = {**self.options, **drop_unset(**(options or {}))}
        if changed:
            sampling_of_recipe = merged.get("sampling") or {}
            merged["sampling"] = (
                replace(sampling_of_recipe, **changed)
                if isinstance(sampling_of_recipe, Sampling)
                else {**sampling_of_recipe, **changed}
            )
        return replace(self, tasks=tasks, options=merged)


def drop_unset(**flags: Any) -> dict[str, Any]:
    """Return the flags that are not None."""
    return {name: value for name, value in flags.items() if value is not None}


MODEL_FLAGS = ("model_name_or_path", "backend", "backend_config", "template")
"""Keywords that a recipe's `agent` function may take."""


def load_recipe(
    recipe: Recipe, flags: Mapping[str, Any], named: Sequence[str] = ("tasks",), *, without_model: bool = False
) -> AgentRun:
    """Load a recipe: `agent`, and optionally `tasks` (rows or a file) and `options`.

    A training recipe's `config` sets the model, unless flags do, and the options.

    `named`: names of the tasks; the first that is defined is used. `without_model`: no token will be sampled, so a
    recipe whose `agent` is a function gets a backend that loads no model.
    """
    if refused := [name for name in flags if name not in MODEL_FLAGS]:
        raise ConfigError(f"a recipe defines its agent, so {', '.join(refused)} cannot be set from outside")
    path = recipe.path
    module = load_module(path, "recipe", recipe.installed_as)
    if without_model and agent_accepts(module, "backend"):
        flags = {**flags, "backend": ScriptedBackend("unused")}
    config = getattr(module, "config", None)
    if isinstance(config, TrainConfig):
        settings = config.agent_settings
        if "backend_config" in flags and "backend" not in flags:
            flags = {**flags, "backend_config": {**settings.get("backend_config", {}), **flags["backend_config"]}}
        flags = {**settings, **flags}
    agent = make_agent(module, **flags)
    tasks = next((getattr(module, name) for name in named if hasattr(module, name)), ())
    if isinstance(tasks, str | Path):
        tasks = read_tasks(path.parent / tasks)
    options = getattr(module, "options", config.agent_options() if isinstance(config, TrainConfig) else {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"`options` in {path} is a {type(options).__name__}; it must be a dict, {{'max_turns': 4}}")
    return AgentRun(agent, tuple(parse_tasks(tasks)) if tasks else (), dict(options))


def require_torch(command: str) -> None:
    """Raise ConfigError with the install command if torch is missing."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"agentfly {command} needs torch: pip install 'agentfly-rl[train]'")


def build_run(flags: Mapping[str, Any]) -> AgentRun:
    """Build an agent from flags; `agent` is its name in AGENTS."""
    settings = dict(flags)
    agent = settings.pop("agent", "hf")
    if agent not in AGENTS:
        raise ConfigError(f"there is no agent {agent!r}; there are {', '.join(AGENTS)}")
    if "model_name_or_path" not in flags:
        raise ConfigError("give a recipe file, or --model with a local folder, a hub name or the name a server knows")

    def find(registry: Registry[T], kind: str, name: str) -> T:
        module, colon, _ = name.partition(":")
        if colon:
            import_here(module, f"{kind} {name!r}")
        return registry.find(name)

    settings["tools"] = [find(TOOLS, "tool", name) for name in flags.get("tools", ())]
    if "reward" in flags:
        settings["reward"] = find(REWARDS, "reward", flags["reward"])
    return AgentRun(AGENTS[agent](**settings))


def run_and_show(
    run: AgentRun, *, tokens: bool = False, save: Path | None = None, console: Console | None = None
) -> RunResult:
    """Run the agent, show its chains live, then a summary."""
    console = console or Console()
    num_chains = run.options.get("num_chains", 1)
    settings = run.settings
    limits = f"{settings.describe_limits()} at temperature {settings.sampling.temperature:g}"
    tasks = f"{len(run.tasks)} {'task' if len(run.tasks) == 1 else 'tasks'}"
    chains = f"{num_chains} {'chain' if num_chains == 1 else 'chains'}"
    print_text(console, f"{tasks} × {chains}; each chain has {limits}", "dim")
    own_observer: Observer | None = run.options.get("observer")

    async def run_to_end(view: LiveView) -> RunResult:
        def observe(event: Event) -> None:
            view(event)
            if own_observer is not None:
                own_observer(event)

        try:
            async with AsyncExitStack() as stack:
                if not view.draws_panels:
                    await stack.enter_async_context(report_waiting(lambda: f"{view.num_ended} chains finished"))
                return await run.agent.run(list(run.tasks), **{**run.options, "observer": observe})
        finally:
            await run.agent.close()

    with LiveView(console) as view:
        result = asyncio.run(run_to_end(view))
    decode = run.agent.template.codec.decode if run.agent.template is not None else None
    if tokens or len(result) == 1:
        for trajectory in result:
            console.print(safe_text(trajectory.render(decode)))
    console.print(summary_table(result))
    for failure, count in Counter(filter(None, map(describe_failure, result))).most_common():
        print_text(console, f"{count} × {failure}", "red")
    if save is not None:
        save_trajectories(save, result)
        print_text(console, f"{len(result)} trajectories written to {save}")
    return result


def has_only_failures(result: RunResult) -> bool:
    """Whether every chain was stopped by a backend, environment or agent failure."""
    faults = {FailureKind.BACKEND, FailureKind.ENVIRONMENT, FailureKind.AGENT}
    return all(trajectory.stop.failure in faults for trajectory in result)


def check_writable(save: Path) -> None:
    """Raise ConfigError before the run if the trajectories could not be written after it."""
    if save.is_dir():
        raise ConfigError(f"--save {save} is a folder; name a file in it")
    if not save.parent.is_dir():
        raise ConfigError(f"--save {save}: there is no folder {save.parent}; make it first")
    if not os.access(save if save.exists() else save.parent, os.W_OK):
        raise ConfigError(f"--save {save} may not be written")
