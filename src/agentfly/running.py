"""What `agentfly run` does: an agent and tasks out of a recipe or flags, shown live."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

import agentfly.tools  # noqa: F401  (so that the prebuilt tools are found by name)
from agentfly import agents
from agentfly.agent import BaseAgent
from agentfly.console import LiveView, summary
from agentfly.errors import ConfigError, DataError
from agentfly.rollout import RunResult
from agentfly.rollout.options import tasks_of
from agentfly.tooling import TOOLS, Tool
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
            tasks = (Task.of(question, "0"),)
        elif data is not None:
            tasks = tuple(read_tasks(data))
        if row is not None:
            tasks = tuple(select(list(tasks), row))
        if not tasks:
            raise ConfigError("there is nothing to run: give --question or --data, or `tasks` in the recipe")
        changed = {name: value for name, value in sampling.items() if value is not None}
        merged = {**self.options, **{name: value for name, value in options.items() if value is not None}}
        if changed:
            before = merged.get("sampling") or {}
            merged["sampling"] = replace(before, **changed) if isinstance(before, Sampling) else {**before, **changed}
        return replace(self, tasks=tasks, options=merged)


def recipe(path: Path, flags: Mapping[str, Any]) -> Run:
    """The run that a recipe file describes: `agent`, and perhaps `tasks` (rows or a file) and `options`."""
    if flags:
        raise ConfigError(f"a recipe makes its own agent, so {', '.join(flags)} cannot be given beside it")
    module = _loaded(path)
    agent = getattr(module, "agent", None)
    agent = agent() if callable(agent) and not isinstance(agent, BaseAgent) else agent
    if not isinstance(agent, BaseAgent):
        raise ConfigError(f"{path} must define `agent`: an agent, or a function that makes one")
    tasks = getattr(module, "tasks", ())
    if isinstance(tasks, str | Path):
        tasks = read_tasks(path.parent / tasks)
    return Run(agent, tuple(tasks_of(tasks)) if tasks else (), dict(getattr(module, "options", {})))


def _loaded(path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"there is no recipe {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def from_flags(kind: str, flags: Mapping[str, Any]) -> Run:
    """The run that the flags describe."""
    if kind not in AGENTS:
        raise ConfigError(f"there is no agent {kind!r}; there are {', '.join(AGENTS)}")
    if "model_name_or_path" not in flags:
        raise ConfigError("give a recipe file, or --model with a local folder, a hub name or the name a server knows")
    tools = [_tool(name) for name in flags.get("tools", ())]
    return Run(AGENTS[kind](**{**flags, "tools": tools}))


def _tool(name: str) -> Tool:
    module, colon, _ = name.partition(":")
    if colon:
        sys.path.insert(0, str(Path.cwd()))
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(f"the tool {name!r} cannot be imported: {error}") from error
    return TOOLS.find(name)


def show(run: Run, *, tokens: bool = False, save: Path | None = None, console: Console | None = None) -> None:
    """Run, live on the console; then sum up."""
    console = console or Console()
    with LiveView(console) as view:
        result = asyncio.run(_finished(run, view))
    decode = run.agent.template.codec.decode if run.agent.template is not None else None
    if tokens or len(result) == 1:
        for trajectory in result:
            console.print(trajectory.render(decode))
    console.print(summary(result))
    if save is not None:
        with save.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(trajectory.to_json(), ensure_ascii=False) + "\n" for trajectory in result)
        console.print(f"{len(result)} trajectories written to {save}", highlight=False)


async def _finished(run: Run, view: LiveView) -> RunResult:
    try:
        return await run.agent.run(list(run.tasks), observer=view, **run.options)
    finally:
        await run.agent.close()
