"""What `agentfly env` does but play: which environments there are, how they start, and what those at work are doing."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentfly.commands.console import harmless
from agentfly.environment import Environment, Pool, Scope, draws_tasks
from agentfly.errors import ConfigError, EnvironmentFault, describe
from agentfly.resources import Figures, Leases, ResourceManager
from agentfly.resources.status import Report, reports
from agentfly.threads import call
from agentfly.tooling import Toolbox
from agentfly.training.data import read_tasks, select
from agentfly.types import Task

LEASES = 10
"""Most leases shown of one manager."""
NO_TASK = Task((), {}, "no task")
NO_TASK_HINT = "It was reset for an empty task; --task FILE --row N, or --question, gives it a real one."
EVERY = 0.5
"""Seconds between two looks."""


def wide_console() -> Console:
    """A terminal as it is; elsewhere, lines long enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def task_of(kind: type[Environment], question: str | None, data: Path | None, row: str | None) -> Task | None:
    """The task that the command line names, or the world's own first one; None where there is neither."""
    if question is not None and data is not None:
        raise ConfigError("--question and --task both say what the task is; give one")
    if data is None:
        if row is not None:
            raise ConfigError("--row takes a row of the file that --task names; give that too")
        if question is not None:
            return Task.of(question, "0")
        return Task.of(kind.draw_tasks("train", 1)[0]) if draws_tasks(kind) else None
    found = select(read_tasks(data), row if row is not None else "0")
    if len(found) != 1:
        raise ConfigError(f"--row {row} is {len(found)} tasks; name one")
    return found[0]


# ── agentfly env list ──


def show(kinds: Iterable[type[Environment]], *, tools: bool) -> None:
    """List environments; with `tools`, what each tool takes and does."""
    kinds, console = list(kinds), wide_console()
    console.print(listing(kinds))
    for kind in kinds:
        if tools and _names(kind):
            console.print(tool_lines(Toolbox([kind])), end="")


def listing(kinds: Iterable[type[Environment]]) -> Table:
    """A line for each environment."""
    table = Table("environment", "what it is", "tools", "shared by", "lives", box=None, header_style="dim")
    for kind in kinds:
        about = (kind.__doc__ or "").strip().partition("\n")[0]
        place = kind.pool.place if isinstance(kind.pool.place, str) else kind.pool.place.name
        shared = {Scope.CHAIN: "nobody", Scope.GROUP: "a group", Scope.GLOBAL: "everybody"}[kind.pool.scope]
        cells = (kind.__name__, about, ", ".join(_names(kind)) or "–", shared, place)
        table.add_row(*(harmless(Text(cell)) for cell in cells))
    return table


def _names(kind: type[Environment]) -> list[str]:
    try:
        return Toolbox([kind]).names
    except ConfigError:  # it has none: rewards and other tools use it
        return []


def tool_lines(toolbox: Toolbox) -> Text:
    """The tools, with what they take and do."""
    lines = Text()
    for tool in toolbox:
        lines.append(f"  {tool.name}", "bold").append(f"  {tool.arguments.usage}\n")
        lines.append(f"      {' '.join(tool.schema['function']['description'].split())}\n", "dim")
    return harmless(lines)


# ── agentfly env start ──


def start(kind: type[Environment], instances: int, task: Task | None, *, once: bool) -> bool:
    """Start so many and say how it went; then, unless `once`, hold them until Ctrl-C. Whether all are well."""
    console = wide_console()
    try:
        return asyncio.run(_started(kind, instances, task, once, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("closed")
        return True


async def _started(kind: type[Environment], instances: int, task: Task | None, once: bool, console: Console) -> bool:
    manager, this = ResourceManager({kind: _held(kind, instances)}), asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    try:
        async with _shown(console, manager):
            troubles, figures = await _tried(manager, kind, instances, task)
        well = instances - sum(troubles.values())
        console.print(figures_table(figures))
        console.print(f"{well} of {instances} {kind.__name__} started, were reset, and are well", highlight=False)
        for trouble, times in troubles.items():
            console.print(harmless(Text(f"{times} × {trouble}", "red")), soft_wrap=True)
        if task is None and any(f"{kind.__name__}.reset failed" in trouble for trouble in troubles):
            console.print(NO_TASK_HINT)
        if well and not once:
            console.print("They are kept warm until Ctrl-C.")
            async with _shown(console, manager):
                await asyncio.get_running_loop().create_future()
        return not troubles
    finally:
        await manager.close()


def _held(kind: type[Environment], instances: int) -> Pool:
    """The environment's own pool, keeping exactly so many."""
    if kind.pool.scope is Scope.GLOBAL and instances > 1:
        raise ConfigError(f"one {kind.__name__} is everybody's (scope='global'); there is never a second")
    if kind.pool.max_instances is not None and instances > kind.pool.max_instances:
        raise ConfigError(
            f"{kind.__name__}.pool has max_instances={kind.pool.max_instances}; {instances} cannot be had"
        )
    return replace(kind.pool, min_warm=instances, max_instances=instances)


async def _tried(
    manager: ResourceManager, kind: type[Environment], instances: int, task: Task | None
) -> tuple[Counter[str], list[Figures]]:
    """Have so many at once, and ask each whether it is well: what is wrong with how many, and the figures."""
    groups = [manager.group() for _ in range(instances)]
    leases = [
        manager.leases(task or NO_TASK, [kind], group=group, chain=f"by hand {number}")
        for number, group in enumerate(groups)
    ]
    troubles = await asyncio.gather(*(_trouble(each, kind) for each in leases))
    figures = manager.figures()
    for held, group in zip(leases, groups, strict=True):
        await held.release()
        group.close()
    return Counter(filter(None, troubles)), figures


async def _trouble(leases: Leases, kind: type[Environment]) -> str:
    """Why an instance cannot be had or is not well; empty where all is well."""
    try:
        await leases.get(kind)
        async with asyncio.timeout(kind.pool.reset_timeout):
            await leases.act([kind], lambda lent: call(lent[kind].check))
    except EnvironmentFault as fault:
        return str(fault)
    except Exception as error:
        return f"{kind.__name__}.check failed: {describe(error)}"
    return ""


@asynccontextmanager
async def _shown(console: Console, manager: ResourceManager) -> AsyncIterator[None]:
    """Draw the manager's figures while something goes on, where there is a terminal to draw in."""
    if not console.is_terminal:
        yield
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:

        async def draw() -> None:
            while True:
                live.update(figures_table(manager.figures()), refresh=True)
                await asyncio.sleep(EVERY)

        drawing = asyncio.create_task(draw())
        try:
            yield
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)


# ── agentfly env status ──


def status(*, watch: bool, as_json: bool) -> None:
    """Show what every manager of this user on this machine is doing; with `watch`, until Ctrl-C."""
    console = wide_console()
    try:
        asyncio.run(_watched(console, watch, as_json))
    except KeyboardInterrupt:
        return


async def _watched(console: Console, watch: bool, as_json: bool) -> None:
    if as_json or not (watch and console.is_terminal):
        while True:
            told = await reports()
            if as_json:
                print(json.dumps([each.to_json() for each in told]), flush=True)
            else:
                console.print(status_view(told))
            if not watch:
                return
            await asyncio.sleep(1)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(status_view(await reports()), refresh=True)
            await asyncio.sleep(1)


def status_view(told: Sequence[Report]) -> RenderableType:
    """What the managers said, one after the other."""
    if not told:
        return Text("No environments of yours are at work on this machine.")
    return Group(*(part for report in told for part in _report_view(report)))


def _report_view(report: Report) -> Iterator[RenderableType]:
    yield harmless(Text(f"process {report.pid}  {report.command}", "bold"))
    if report.silence:
        yield harmless(Text(f"  {report.silence}\n", "red"))
        return
    yield figures_table(report.figures)
    leases = [(lent, each.environment) for each in report.figures for lent in each.leases]
    leases.sort(key=lambda lease: -lease[0].seconds)
    for lent, environment in leases[:LEASES]:
        yield harmless(Text(f"  {environment} {lent.instance}: {lent}", "dim"))
    if len(leases) > LEASES:
        yield Text(f"  and {len(leases) - LEASES} more that were lent later", "dim")
    for each in report.figures:
        if each.broken:
            yield harmless(Text(f"  {each.broken}", "red"))
    yield Text()


def figures_table(figures: Iterable[Figures]) -> Table:
    """A line for each pool."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("environment")
    table.add_column("lives")
    times = ("wait", "start", "reset", "step")
    columns = ("starting", "warm", "lent", "waiting", "buried", "memory", *(f"{each} p50 p95" for each in times))
    for title in columns:
        table.add_column(title, justify="right")
    for each in figures:
        most = "" if each.max_instances is None else f"/{each.max_instances}"
        counts = (each.starting, each.warm, f"{each.lent}{most}", each.waiting, each.buried)
        quantiles = (_quantiles(each.seconds.get(name, {})) for name in times)
        names = (harmless(Text(each.environment)), harmless(Text(each.place)))
        table.add_row(*names, *map(str, counts), _size(each.memory), *quantiles)
    return table


def _quantiles(of: Mapping[str, float]) -> str:
    return f"{_time(of['p50'])} {_time(of['p95'])}" if of.get("count") else "–"


def _time(seconds: float) -> str:
    if seconds < 0.0009995:
        return f"{seconds * 1e6:.0f}µs"
    return f"{seconds * 1e3:.3g}ms" if seconds < 0.9995 else f"{seconds:.3g}s"


def _size(memory: int | None) -> str:
    return "–" if memory is None else f"{memory / (1 << 20):.0f} MB"
