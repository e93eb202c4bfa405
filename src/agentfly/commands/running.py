"""What `agentfly run` does: an agent and tasks out of a recipe or flags, shown live."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agentfly import agents
from agentfly.agent import BaseAgent
from agentfly.backends.scripted import ScriptedBackend
from agentfly.commands.console import LiveView, harmless, summary
from agentfly.commands.loading import load, make_agent, takes
from agentfly.errors import ConfigError, DataError, describe
from agentfly.outcome import FailureKind
from agentfly.registry import Registry, T
from agentfly.rollout import RunResult
from agentfly.rollout.events import Event, Observer
from agentfly.rollout.options import tasks_of
from agentfly.scoring import REWARDS
from agentfly.tooling import TOOLS
from agentfly.training.config import TrainConfig
from agentfly.training.data import read_tasks, select
from agentfly.types import Sampling, Task

AGENTS: dict[str, type[BaseAgent]] = {
    "hf": agents.HFAgent,
    "react": agents.ReactAgent,
    "code": agents.CodeAgent,
    "action": agents.ActionAgent,
}


@dataclass(frozen=True, slots=True)
class Run:
    """An agent, what to run it on, and how."""

    agent: BaseAgent
    tasks: tuple[Task, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `BaseAgent.run`."""

    def overridden(
        self,
        question: str | None,
        data: Path | None,
        row: str | None,
        sampling: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Run:
        """The same with what the command line says; None leaves a thing as it is."""
        if question is not None and data is not None:
            raise ConfigError("--question and --data both say what to run; give one")
        tasks = self.tasks
        if question is not None:
            tasks = (Task.of(_as_typed(question), "0"),)
        elif data is not None:
            tasks = tuple(read_tasks(data))
        if not tasks:
            raise ConfigError("there is nothing to run: give --question or --data, or `tasks` in the recipe")
        if row is not None:
            tasks = tuple(select(list(tasks), row))
        changed = {name: value for name, value in sampling.items() if value is not None}
        merged = {**self.options, **{name: value for name, value in options.items() if value is not None}}
        if changed:
            before = merged.get("sampling") or {}
            merged["sampling"] = replace(before, **changed) if isinstance(before, Sampling) else {**before, **changed}
        return replace(self, tasks=tasks, options=merged)


def _as_typed(argument: str) -> str:
    """An argument in UTF-8, whatever the locale made of its bytes."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def given(**flags: Any) -> dict[str, Any]:
    """The flags that were given."""
    return {name: value for name, value in flags.items() if value is not None}


MODEL = ("model_name_or_path", "backend", "backend_config", "template")
"""What a recipe's function may be told about the model."""


def recipe(path: Path, flags: Mapping[str, Any], named: Sequence[str] = ("tasks",), *, unheard: bool = False) -> Run:
    """The run that a recipe file describes: `agent`, and perhaps `tasks` (rows or a file) and `options`.

    A recipe for training says with its `config` which model, unless flags do, and how the agent is run.

    `named`: what the tasks may be called, the first that is there counts. `unheard`: the agent's model will not be
    asked for a word, so a recipe whose `agent` is a function is given a backend that loads none.
    """
    if others := [name for name in flags if name not in MODEL]:
        raise ConfigError(f"a recipe makes its own agent, so {', '.join(others)} cannot be given beside it")
    module = load(path, "recipe")
    if unheard and takes(module, "backend"):
        flags = {**flags, "backend": ScriptedBackend("unheard")}
    config = getattr(module, "config", None)
    if isinstance(config, TrainConfig):
        flags = {**config.agent_settings, **flags}
    agent = make_agent(module, **flags)
    tasks = next((getattr(module, name) for name in named if hasattr(module, name)), ())
    if isinstance(tasks, str | Path):
        tasks = read_tasks(path.parent / tasks)
    options = getattr(module, "options", config.agent_options if isinstance(config, TrainConfig) else {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"`options` in {path} is a {type(options).__name__}; it must be a dict, {{'max_turns': 4}}")
    return Run(agent, tuple(tasks_of(tasks)) if tasks else (), dict(options))


def refuse_without_torch(command: str) -> None:
    """Say what to install, before an import fails."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"agentfly {command} needs torch: pip install 'agentfly[train]'")


def from_flags(kind: str, flags: Mapping[str, Any]) -> Run:
    """The run that the flags describe."""
    if kind not in AGENTS:
        raise ConfigError(f"there is no agent {kind!r}; there are {', '.join(AGENTS)}")
    if "model_name_or_path" not in flags:
        raise ConfigError("give a recipe file, or --model with a local folder, a hub name or the name a server knows")
    tools = [_found(TOOLS, "tool", name) for name in flags.get("tools", ())]
    rewards = {"reward": _found(REWARDS, "reward", flags["reward"])} if "reward" in flags else {}
    return Run(AGENTS[kind](**{**flags, "tools": tools, **rewards}))


def _found(registry: Registry[T], kind: str, name: str) -> T:
    module, colon, _ = name.partition(":")
    if colon:
        sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ConfigError(f"the {kind} {name!r} cannot be imported: {describe(error)}") from error
    return registry.find(name)


def show(run: Run, *, tokens: bool = False, save: Path | None = None, console: Console | None = None) -> RunResult:
    """Run, live on the console; then sum up."""
    console = console or Console()
    with LiveView(console) as view:
        result = asyncio.run(_finished(run, view))
    decode = run.agent.template.codec.decode if run.agent.template is not None else None
    if tokens or len(result) == 1:
        for trajectory in result:
            console.print(harmless(trajectory.render(decode)))
    console.print(summary(result))
    if save is not None:
        _write(result, save)
        console.print(f"{len(result)} trajectories written to {save}", highlight=False, markup=False)
    return result


def nothing_came_of(result: RunResult) -> bool:
    """Whether every chain was stopped by a fault that was not the model's."""
    faults = {FailureKind.BACKEND, FailureKind.ENVIRONMENT, FailureKind.AGENT}
    return all(trajectory.stop.failure in faults for trajectory in result)


def refuse_unwritable(save: Path) -> None:
    """Find out before the run, not after it, that its trajectories could not be kept."""
    if save.is_dir():
        raise ConfigError(f"--save {save} is a folder; name a file in it")
    if not save.parent.is_dir():
        raise ConfigError(f"--save {save}: there is no folder {save.parent}; make it first")
    if not os.access(save if save.exists() else save.parent, os.W_OK):
        raise ConfigError(f"--save {save} may not be written")


def _write(result: RunResult, save: Path) -> None:
    try:
        # Half a surrogate pair, which UTF-8 has no bytes for, is written as the escape that JSON has for it.
        with save.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(trajectory.to_json(), ensure_ascii=False) + "\n" for trajectory in result)
    except OSError as error:
        raise DataError(f"--save {save} could not be written: {error.strerror or error}") from error


async def _finished(run: Run, view: LiveView) -> RunResult:
    try:
        options = {**run.options, "observer": _both(view, run.options.get("observer"))}
        return await run.agent.run(list(run.tasks), **options)
    finally:
        await run.agent.close()


def _both(view: Observer, also: Observer | None) -> Observer:
    """The view, and the recipe's own observer where it has one."""

    def observe(event: Event) -> None:
        view(event)
        if also is not None:
            also(event)

    return observe
