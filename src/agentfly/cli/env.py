"""`agentfly env`: list, check, play, serve, scaffold and monitor environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="List, check, play, serve, scaffold and monitor environments.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

EnvironmentName = Annotated[
    str, typer.Argument(metavar="NAME", help="Installed environment, module:Class, or path/to/file.py:Class.")
]
TaskQuestion = Annotated[str | None, typer.Option("--question", "-q", help="Question of the task to reset it for.")]
TaskFile = Annotated[Path | None, typer.Option("--task", help="File of tasks; --row selects the one to reset it for.")]
TaskRow = Annotated[str | None, typer.Option(help="Task of the file, by number or id; default: the first.")]


@app.command("list")
def list_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One environment, with its tools in full.")
    ] = None,
) -> None:
    """List the installed environments, or describe one with its tools."""
    from agentfly.cli.env_instances import show_environments
    from agentfly.cli.resolve import list_environments, resolve_environment

    if name is not None:
        show_environments([resolve_environment(name)], tools=True)
    else:
        loaded, errors = list_environments()
        show_environments(loaded.values(), errors=errors)


@app.command("start")
def start_command(
    name: EnvironmentName,
    instances: Annotated[int, typer.Option("--instances", "-n", min=1, help="Number of instances.")] = 1,
    question: TaskQuestion = None,
    task: TaskFile = None,
    row: TaskRow = None,
    once: Annotated[bool, typer.Option("--once", help="Close them after reporting how they started.")] = False,
) -> None:
    """Start instances and keep them warm until Ctrl-C. Prints how they started."""
    from agentfly.cli.env_instances import resolve_task, start_instances
    from agentfly.cli.resolve import resolve_environment

    env_class = resolve_environment(name)
    healthy = start_instances(env_class, instances, resolve_task(env_class, question, task, row), once=once)
    raise typer.Exit(0 if healthy else 1)


@app.command("play")
def play_command(
    name: EnvironmentName, question: TaskQuestion = None, task: TaskFile = None, row: TaskRow = None
) -> None:
    """Act in an environment by hand, and see what a model would see."""
    from agentfly.cli.env_instances import resolve_task
    from agentfly.cli.env_play import play
    from agentfly.cli.resolve import resolve_environment

    env_class = resolve_environment(name)
    play(env_class, resolve_task(env_class, question, task, row))


@app.command("check")
def check_command(
    name: EnvironmentName,
    tasks: Annotated[Path | None, typer.Option(help="File of tasks; default: the environment draws its own.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of drawn tasks and generated calls.")] = 0,
    instances: Annotated[int, typer.Option("--instances", "-n", min=1, help="Number of concurrent instances.")] = 4,
    seconds: Annotated[float, typer.Option(min=1, help="CPU time limit of each property, in seconds.")] = 120.0,
) -> None:
    """Check that an environment keeps the contract. Prints a line per property."""
    from rich.text import Text

    from agentfly.cli.env_instances import make_console
    from agentfly.cli.live_view import sanitize_text
    from agentfly.cli.resolve import resolve_environment
    from agentfly.conformance import PropertyResult, PropertyStatus, check_environment
    from agentfly.data import read_tasks

    console = make_console()
    styles = {PropertyStatus.PASS: "green", PropertyStatus.FAIL: "bold red", PropertyStatus.NOT_APPLICABLE: "dim"}

    def print_result(result: PropertyResult) -> None:
        status = (f"{result.status.value:4}", styles[result.status])
        line = Text.assemble(status, f"  {result.name:<20}  {result.detail}")
        console.print(sanitize_text(line), soft_wrap=True)

    env_class = resolve_environment(name)
    report = check_environment(
        env_class,
        tasks=read_tasks(tasks) if tasks is not None else (),
        seed=seed,
        instances=instances,
        seconds=seconds,
        on_result=print_result,
    )
    passed = sum(each.status is PropertyStatus.PASS for each in report.results)
    failed = f", {len(report.failures)} do not" if report.failures else ""
    console.print(f"{env_class.__name__}: {passed} properties hold{failed}", highlight=False, style="bold")
    raise typer.Exit(0 if report.ok else 1)


@app.command("serve")
def serve_command(
    name: EnvironmentName,
    reward: Annotated[str | None, typer.Option(help="Reward of an episode; default: the environment's own.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 accepts other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    sessions: Annotated[int, typer.Option(min=1, help="Maximum number of clients at once.")] = 64,
    api_key: Annotated[
        str | None, typer.Option(envvar="AGENTFLY_API_KEY", help="Key that clients must send; needed unless loopback.")
    ] = None,
) -> None:
    """Serve an environment by the OpenEnv protocol until Ctrl-C."""
    import asyncio

    from agentfly.cli.resolve import resolve_environment
    from agentfly.cli.serve import SignalFlag
    from agentfly.integrations.openenv import OpenEnvServer

    env_class = resolve_environment(name)
    server = OpenEnvServer(env_class, reward=reward, host=host, port=port, max_sessions=sessions, api_key=api_key)

    async def run(signals: SignalFlag) -> None:
        async with server:
            usage = f'GenericEnvClient(base_url="{server.url}")'
            print(f"agentfly: {env_class.__name__} is served at {server.url}; use it with\n  {usage}", flush=True)
            while not signals.received:  # noqa: ASYNC110  (a handler sets it)
                await asyncio.sleep(0.1)
            print("agentfly: stopping the server", flush=True)

    with SignalFlag() as signals:
        asyncio.run(run(signals))


@app.command("new")
def new_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment: tic_tac_toe, or TicTacToe.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: a folder of that name, here.")] = None,
) -> None:
    """Scaffold a working environment. It has tasks, expert, reward, tests and a recipe."""
    from agentfly.cli.env_new import create_environment

    create_environment(name, out)


@app.command("status")
def status_command(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Update every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one line per update.")] = False,
) -> None:
    """Show the pools and leases of environments. They are those of all your processes on this machine."""
    from agentfly.cli.env_instances import show_status

    show_status(watch=watch, as_json=as_json)
