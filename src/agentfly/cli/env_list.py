"""Work of `agentfly env list`, and what other commands of `env` share: the task of their options, lists of tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.table import Column, Table
from rich.text import Text

from agentfly.cli.console import make_console, print_text, safe_text
from agentfly.data import read_tasks, select
from agentfly.environment import Environment, has_tasks
from agentfly.errors import ConfigError
from agentfly.tooling import Toolbox
from agentfly.types import Task


def resolve_task(env_class: type[Environment], question: str | None, data: Path | None, row: str | None) -> Task | None:
    """Return the task that the options select, else the environment's first training task; None if it draws none."""
    if question is not None and data is not None:
        raise ConfigError("--question and --task both select a task; give one")
    if data is None:
        if row is not None:
            raise ConfigError("--row selects a row of the --task file; give --task too")
        if question is not None:
            return Task.of(question, "0")
        return Task.of(env_class.draw_tasks("train", 1)[0]) if has_tasks(env_class) else None
    tasks = select(read_tasks(data), row if row is not None else "0")
    if len(tasks) != 1:
        raise ConfigError(f"--row {row} selects {len(tasks)} tasks; select one")
    return tasks[0]


def show_environments(
    env_classes: Iterable[type[Environment]], *, tools: bool = False, errors: Sequence[ConfigError] = ()
) -> None:
    """Print a table of environments; with `tools`, also the usage and description of each tool.

    `errors`: why other installed environments cannot be loaded.
    """
    env_classes = list(env_classes)
    console = make_console()
    name_column = Column("environment", no_wrap=True)
    table = Table(name_column, "description", "scope", "runtime", box=None, header_style="dim")
    for env_class in env_classes:
        description = (env_class.__doc__ or "").strip().partition("\n")[0]
        runtime = env_class.pool.runtime if isinstance(env_class.pool.runtime, str) else env_class.pool.runtime.name
        cells = (env_class.__name__, description, env_class.pool.scope.value, runtime)
        table.add_row(*(safe_text(cell) for cell in cells))
    console.print(table)
    for env_class in env_classes if tools else ():
        with suppress(ConfigError):  # it has no tools: rewards and other tools use it
            console.print(tool_lines(Toolbox([env_class])), end="")
    for error in errors:
        print_text(console, str(error), "red")
    if not tools:
        console.print("\nagentfly env list NAME describes the tools of one; agentfly env play NAME calls them by hand.")


def tool_lines(toolbox: Toolbox) -> Text:
    """Format the usage and description of each tool."""
    lines = Text()
    for tool in toolbox:
        lines.append(f"  {tool.name}", "bold").append(f"  {tool.arguments.usage}\n")
        lines.append(f"      {' '.join(tool.schema['function']['description'].split())}\n", "dim")
    return safe_text(lines)
