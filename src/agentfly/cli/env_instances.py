"""Work of `agentfly env list`, `start` and `status`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from agentfly.cli.console import make_console, print_text, safe_text
from agentfly.data import read_tasks, select
from agentfly.environment import Environment, Scope, has_tasks
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.resources import Leases, PoolMetrics, ResourceManager
from agentfly.resources.status import ManagerStatus, read_statuses
from agentfly.threads import call
from agentfly.tooling import Toolbox
from agentfly.types import Task

LEASES = 10
"""Maximum number of leases shown per manager."""
NO_TASK = Task((), {}, "no task")
NO_TASK_HINT = "It was reset for an empty task; use --task FILE --row N, or --question, for a real one."
REFRESH_SECONDS = 0.5


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
    found = select(read_tasks(data), row if row is not None else "0")
    if len(found) != 1:
        raise ConfigError(f"--row {row} selects {len(found)} tasks; select one")
    return found[0]


# ── agentfly env list ──


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
        scope = {Scope.CHAIN: "chain", Scope.GROUP: "group", Scope.GLOBAL: "global"}[env_class.pool.scope]
        cells = (env_class.__name__, description, scope, runtime)
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


# ── agentfly env start ──


def start_instances(env_class: type[Environment], instances: int, task: Task | None, *, once: bool) -> bool:
    """Start instances and report the outcome; unless `once`, keep them until Ctrl-C. Whether all are healthy."""
    console = make_console()
    try:
        return asyncio.run(_start(env_class, instances, task, once, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("closed")
        return True


async def _start(env_class: type[Environment], instances: int, task: Task | None, once: bool, console: Console) -> bool:
    if env_class.pool.scope is Scope.GLOBAL and instances > 1:
        raise ConfigError(f"all chains share one {env_class.__name__} (scope='global'); there is no second instance")
    if env_class.pool.max_instances is not None and instances > env_class.pool.max_instances:
        raise ConfigError(
            f"{env_class.__name__}.pool has max_instances={env_class.pool.max_instances}; {instances} are not possible"
        )
    manager = ResourceManager({env_class: replace(env_class.pool, min_warm=instances, max_instances=instances)})
    current = asyncio.current_task()
    assert current is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    try:
        async with _live_metrics(console, manager):
            errors, metrics = await _lease_all(manager, env_class, instances, task)
        healthy = instances - sum(errors.values())
        console.print(metrics_table(metrics))
        console.print(
            f"{healthy} of {instances} {env_class.__name__} started, were reset, and are healthy", highlight=False
        )
        for error, count in errors.items():
            print_text(console, f"{count} × {error}", "red")
        if task is None and any(f"{env_class.__name__}.reset failed" in error for error in errors):
            console.print(NO_TASK_HINT)
        if healthy and not once:
            console.print("They are kept warm until Ctrl-C.")
            async with _live_metrics(console, manager):
                await asyncio.get_running_loop().create_future()
        return not errors
    finally:
        await manager.close()


async def _lease_all(
    manager: ResourceManager, env_class: type[Environment], instances: int, task: Task | None
) -> tuple[Counter[str], list[PoolMetrics]]:
    """Lease all instances concurrently and run their health checks; count the errors, and return the pool metrics."""

    async def find_error(leases: Leases) -> str:
        """Describe why an instance cannot be leased or is not healthy; empty if it is."""
        try:
            await leases.get(env_class)
            async with asyncio.timeout(env_class.pool.reset_timeout):
                await leases.act([env_class], lambda environments: call(environments[env_class].check))
        except EnvironmentFault as fault:
            return str(fault)
        except Exception as error:
            return f"{env_class.__name__}.check failed: {describe(error)}"
        return ""

    groups = [manager.group() for _ in range(instances)]
    leases = [
        manager.leases(task or NO_TASK, [env_class], group=group, chain=f"by hand {number}")
        for number, group in enumerate(groups)
    ]
    errors = await asyncio.gather(*map(find_error, leases))
    metrics = manager.pool_metrics()
    for held, group in zip(leases, groups, strict=True):
        await held.release()
        group.close()
    return Counter(filter(None, errors)), metrics


@asynccontextmanager
async def _live_metrics(console: Console, manager: ResourceManager) -> AsyncIterator[None]:
    """Show the pool metrics inside the block, if there is a terminal."""
    if not console.is_terminal:
        yield
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        async def draw() -> None:
            while True:
                live.update(metrics_table(manager.pool_metrics()), refresh=True)
                await asyncio.sleep(REFRESH_SECONDS)

        drawing = asyncio.create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)


# ── agentfly env status ──


def show_status(*, watch: bool, as_json: bool) -> None:
    """Show the status of all managers of this user on this machine; with `watch`, until Ctrl-C."""
    console = make_console()
    is_live = watch and console.is_terminal and not as_json

    async def show() -> None:
        with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:
            while True:
                statuses = await read_statuses()
                if live is not None:
                    live.update(status_view(statuses), refresh=True)
                elif as_json:
                    print(json.dumps([each.to_json() for each in statuses]), flush=True)
                else:
                    console.print(status_view(statuses))
                if not watch:
                    return
                await asyncio.sleep(1)

    with suppress(KeyboardInterrupt):
        asyncio.run(show())


def status_view(statuses: Sequence[ManagerStatus]) -> RenderableType:
    """Render the status of each manager."""
    parts: list[RenderableType] = []
    for status in statuses:
        parts.append(safe_text(f"process {status.pid}  {status.command}", "bold"))
        if status.error:
            parts.append(safe_text(f"  {status.error}\n", "red"))
            continue
        parts.append(metrics_table(status.pools))
        leases = [(lease, each.environment) for each in status.pools for lease in each.leases]
        leases.sort(key=lambda lease: -lease[0].seconds)
        for lease, environment in leases[:LEASES]:
            parts.append(safe_text(f"  {environment} {lease.instance}: {lease}", "dim"))
        if len(leases) > LEASES:
            parts.append(Text(f"  and {len(leases) - LEASES} more recent leases", "dim"))
        parts += [safe_text(f"  {each.broken}", "red") for each in status.pools if each.broken]
        parts.append(Text())
    return Group(*parts) if parts else Text("You have no running environments on this machine.")


def metrics_table(figures: Iterable[PoolMetrics]) -> Table:
    """Create a table with a row per pool."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("environment")
    table.add_column("runtime")
    times = ("wait", "start", "reset", "step")
    columns = ("starting", "warm", "leased", "waiting", "evicted", "memory", *(f"{each} p50 p95" for each in times))
    for title in columns:
        table.add_column(title, justify="right")
    for each in figures:
        most = "" if each.max_instances is None else f"/{each.max_instances}"
        counts = (each.starting, each.warm, f"{each.leased}{most}", each.waiting, each.evicted)
        summaries = [each.seconds.get(name, {}) for name in times]
        quantiles = [f"{_time(s['p50'])} {_time(s['p95'])}" if s.get("count") else "–" for s in summaries]
        names = (safe_text(each.environment), safe_text(each.runtime))
        table.add_row(
            *names, *map(str, counts), "–" if each.memory is None else f"{each.memory / (1 << 20):.0f} MB", *quantiles
        )
    return table


def _time(seconds: float) -> str:
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f}µs"
    return f"{seconds * 1e3:.3g}ms" if seconds < 0.9995 else f"{seconds:.3g}s"
