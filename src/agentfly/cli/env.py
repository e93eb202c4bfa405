"""`agentfly env`: list, check, play, serve and scaffold environments."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly.cli.serve import ApiKey, Host, SignalFlag
from agentfly.errors import ConfigError, DataError

if TYPE_CHECKING:
    from agentfly.conformance import PropertyResult
    from agentfly.environment import Environment

app = typer.Typer(
    help="List, check, play, serve and scaffold environments.", no_args_is_help=True, rich_markup_mode=None
)

EnvironmentName = Annotated[
    str, typer.Argument(metavar="NAME", help="Installed environment, module:Class, or path/to/file.py:Class.")
]
PlayName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Installed environment, module:Class, path/to/file.py:Class, or task folders."),
]
TaskQuestion = Annotated[str | None, typer.Option("--question", "-q", help="Question of the task to reset it for.")]
TaskFile = Annotated[
    Path | None, typer.Option("--task", help="File of tasks, or task folders; --row selects the one to reset it for.")
]
TaskRow = Annotated[str | None, typer.Option(help="Task of the file, by number or id; default: the first.")]


@app.command("list")
def list_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One environment, with its tools in full.")
    ] = None,
) -> None:
    """List the installed environments, or describe one with its tools."""
    from agentfly.cli.env_list import show_environments
    from agentfly.cli.resolve import list_environments, resolve_environment

    if name is not None:
        show_environments([resolve_environment(name)], tools=True)
    else:
        loaded, errors = list_environments()
        show_environments(loaded.values(), errors=errors)


@app.command("play")
def play_command(name: PlayName, question: TaskQuestion = None, task: TaskFile = None, row: TaskRow = None) -> None:
    """Act in an environment by hand, and see what a model would see."""
    from agentfly.cli.env_list import resolve_task
    from agentfly.cli.env_play import play
    from agentfly.cli.resolve import resolve_environment
    from agentfly.data.task_folders import find_task_folders

    if task is None and find_task_folders(Path(name)):
        name, task = "TaskFolder", Path(name)
    env_class = resolve_environment(name)
    play(env_class, resolve_task(env_class, question, task, row))


@app.command("check")
def check_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="An environment as in `env play`, or task folders.")],
    tasks: Annotated[
        Path | None, typer.Option(help="File of tasks, or task folders; default: the environment draws its own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of drawn tasks and generated calls.")] = 0,
    instances: Annotated[int, typer.Option("--instances", "-n", min=1, help="Number of concurrent instances.")] = 4,
    seconds: Annotated[float, typer.Option(min=1, help="CPU time limit of each property, in seconds.")] = 120.0,
) -> None:
    """Check that an environment keeps the contract, a line per property; or that task folders can be solved."""
    from agentfly.cli.console import make_console, print_text
    from agentfly.cli.resolve import resolve_environment
    from agentfly.conformance import PropertyStatus, check_environment
    from agentfly.data import read_tasks
    from agentfly.data.task_folders import find_task_folders

    root = next((path for path in (Path(name), tasks) if path is not None and find_task_folders(path)), None)
    if root is not None:
        for option in ("seed", "seconds") if root is tasks else ("tasks", "seed", "seconds"):
            source = context.get_parameter_source(option)
            if source is not None and source.name != "DEFAULT":
                raise ConfigError(f"--{option} has no effect on task folders: each is checked by itself; leave it out")
        env_class = resolve_environment(name if root is tasks else "TaskFolder")
        raise typer.Exit(0 if _check_task_folders(env_class, root, instances) else 1)
    env_class = _load_environment(name)
    report = check_environment(
        env_class,
        tasks=read_tasks(tasks) if tasks is not None else (),
        seed=seed,
        instances=instances,
        seconds=seconds,
        on_result=_print_result,
    )
    passed = sum(result.status is PropertyStatus.PASS for result in report.results)
    failed = f", {len(report.failures)} do not" if report.failures else ""
    print_text(make_console(), f"{env_class.__name__}: {passed} properties hold{failed}", "bold")
    raise typer.Exit(0 if report.ok else 1)


def _check_task_folders(env_class: type[Environment], root: Path, instances: int) -> bool:
    """Print whether each task folder in `root` can be read and solved. Returns whether all can."""
    import asyncio

    from agentfly.conformance import PropertyResult, PropertyStatus
    from agentfly.conformance.tasks import check_tasks
    from agentfly.data.task_folders import TaskFiles, find_task_folders
    from agentfly.types import Task

    folders = find_task_folders(root)
    readable = []
    for folder in sorted(root.glob("[!.]*/")) if folders != [root] else ():
        if folder not in folders:  # a misspelled task.toml would otherwise leave a task out unnoticed
            detail = "has no task.toml, and is not read as a task"
            _print_result(PropertyResult(folder.name, PropertyStatus.NOT_APPLICABLE, detail))
    for folder in folders:
        try:
            files = TaskFiles.read(folder.resolve())
        except DataError as error:
            _print_result(PropertyResult(folder.name, PropertyStatus.FAIL, str(error)))
            continue
        readable.append(Task.of(files.to_row()))
        if keys := files.ignored_keys():
            detail = f"without effect: {', '.join(keys)}"
            _print_result(PropertyResult(files.name, PropertyStatus.NOT_APPLICABLE, detail))
    solved = asyncio.run(check_tasks(env_class, readable, instances=instances, on_result=_print_result))
    return solved and len(readable) == len(folders)


def _print_result(result: PropertyResult) -> None:
    from rich.text import Text

    from agentfly.cli.console import make_console, print_text
    from agentfly.conformance import PropertyStatus

    styles = {PropertyStatus.PASS: "green", PropertyStatus.FAIL: "bold red", PropertyStatus.NOT_APPLICABLE: "dim"}
    status = (f"{result.status.value:4}", styles[result.status])
    print_text(make_console(), Text.assemble(status, f"  {result.name:<20}  {result.detail}"))


def _load_environment(name: str) -> type[Environment]:
    """Resolve an environment to check. A path without task folders is named as such, not as an unknown environment."""
    from agentfly.cli.resolve import resolve_environment

    try:
        return resolve_environment(name)
    except ConfigError as error:
        if ":" in name or name.endswith(".py"):
            raise
        if Path(name).is_dir():
            raise ConfigError(
                f"{name} is a folder without task folders (NAME/task.toml), and no environment"
            ) from error
        if len(Path(name).parts) > 1:
            raise ConfigError(f"there is no folder {name}") from error
        raise ConfigError(f"{error} There is no folder of that name, either.") from error


@app.command("serve")
def serve_command(
    name: EnvironmentName,
    reward: Annotated[str | None, typer.Option(help="Reward of an episode; default: the environment's own.")] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    sessions: Annotated[int, typer.Option(min=1, help="Maximum number of clients at once.")] = 64,
    api_key: ApiKey = None,
) -> None:
    """Serve an environment over the OpenEnv protocol until Ctrl-C."""
    import asyncio

    from agentfly.cli.resolve import resolve_environment
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
    module = module_name(name)
    folder = out if out is not None else Path(module)
    paths = write_files(module, folder)
    environment, _, recipe, _ = paths
    warm = folder / "warm"
    for path in paths:
        print(f"wrote {path}")
    # A new model must imitate the expert first: one that never calls the tool is never rewarded.
    print(
        f"\nagentfly env play {environment}\nagentfly env check {environment}\npytest {folder}\n"
        f"agentfly sft {recipe} --model new --expert 300 --steps 28 --learning-rate 1e-3 --out {warm}\n"
        f"agentfly train {recipe} model={warm}\npip install --editable {folder}"
    )


TEMPLATES = Path(__file__).parent / "starter"
FILES = {
    "{module}.py": "environment.py.jinja",
    "test_{module}.py": "test.py.jinja",
    "{module}_recipe.py": "recipe.py.jinja",
    "pyproject.toml": "pyproject.toml.jinja",
}
RESERVED = {
    "agent", "any", "config", "direction", "environment", "h_f_agent", "literal", "recipe", "task", "tasks", "tool",
    "tool_call", "train_config",
}  # fmt: skip
"""Module names that would clash with names in the written files."""
MAX_LENGTH = 24


def module_name(name: str) -> str:
    """Convert a name to a module name: `tic_tac_toe` for tic-tac-toe and TicTacToe. Raises ConfigError if invalid."""
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
    fits = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", module, re.ASCII) and len(module) <= MAX_LENGTH
    if not fits or keyword.iskeyword(module):
        raise ConfigError(
            f"{name!r:.60} is not a module name: use at most {MAX_LENGTH} letters, digits and _, such as tic_tac_toe"
        )
    if module in RESERVED or module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None:
        raise ConfigError(f"{module!r} is already the name of something else; choose another, such as my_{module}")
    return module


def write_files(module: str, folder: Path) -> list[Path]:
    """Write the files into the folder; raises ConfigError instead of overwriting a file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    class_name = "".join(map(str.capitalize, module.split("_")))
    names = {"module": module, "class_name": class_name, "title": module.replace("_", " ").capitalize()}
    paths = {folder / file.format(module=module): template for file, template in FILES.items()}
    if existing := [str(path) for path in paths if path.exists() or path.is_symlink()]:
        verb, them = ("already exists", "it") if len(existing) == 1 else ("already exist", "them")
        raise ConfigError(f"{', '.join(existing)} {verb}; remove {them}, or choose another folder with --out")
    jinja = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in paths.items():
            path.write_text(jinja.get_template(template).render(names))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    return list(paths)
