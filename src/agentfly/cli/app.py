"""The `agentfly` command. Arguments are parsed first; commands import what they need afterwards."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from agentfly import plugins
from agentfly.cli import doctor, env, mcp, models, recipes, report, serve, template, view
from agentfly.cli.commands import evaluate, run, sft
from agentfly.cli.signals import handle_sigterm
from agentfly.errors import AgentFlyError, ConfigError, sanitize


class _Commands(TyperGroup):
    """The commands below, and those that installed packages provide by entry point. One of these is imported only when
    it runs: for the list of commands, its module docstring is read."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return [*names, *(name for name in _list_names() if name not in names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in _list_names():
            return TyperCommand(cmd_name, help=_summarize(cmd_name))
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if super().get_command(ctx, args[0]) is not None or args[0] not in _list_names():
            return super().resolve_command(ctx, args)
        plugin = plugins.find_plugin(plugins.COMMANDS, args[0])
        assert plugin is not None
        return args[0], typer.main.get_command(plugin.load()), args[1:]

    def invoke(self, ctx: Any) -> Any:
        """Run a command. One that Ctrl-C stops before it can report what is kept gets a line of its own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _print_error(f"agentfly {ctx.invoked_subcommand}: stopped")
            raise


class _Subcommands(TyperGroup):
    """Commands of a command. One that does not exist, such as the name of a recipe, is answered with those that do."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            there_are = ", ".join(self.list_commands(ctx))
            raise ConfigError(
                f"{ctx.info_name} has no command {args[0]!r}; there are: {there_are}. See {ctx.command_path} --help"
            )
        return super().resolve_command(ctx, args)


def _list_names() -> list[str]:
    return list(dict.fromkeys(plugin.name for plugin in plugins.list_plugins(plugins.COMMANDS)))


def _summarize(command: str) -> str:
    try:
        plugin = plugins.find_plugin(plugins.COMMANDS, command)
        assert plugin is not None
        text = plugin.documentation()
    except ConfigError as error:
        return str(error)
    return text.partition("\n")[0].partition(": ")[2] or text


_HELP_FIELDS = "--help-fields"


class _TrainCommand(TyperCommand):
    """A command with config overrides.

    `--help-fields [NAME]` prints their reference; an unknown option that is a field gets an error that shows how to
    write it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if _HELP_FIELDS in args:
            from agentfly.cli.fields import print_fields

            names = [argument for argument in args[args.index(_HELP_FIELDS) + 1 :] if not argument.startswith("-")]
            print_fields(names[0] if names else None)
            ctx.exit()
        options = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        for argument, following in pairwise([*args, "VALUE"]):
            option, _, value = argument.partition("=")
            if option.startswith("--") and option not in options:
                from agentfly.training.config import find_field

                if field := find_field(option[2:].replace("-", "_")):
                    raise ConfigError(f"{option} is a config field, not an option: write {field}={value or following}")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

HelpFields = Annotated[bool, typer.Option(_HELP_FIELDS, help="Print the config fields, or those of the NAME after it.")]
RunFolder = Annotated[Path | None, typer.Option(help="Run directory; default: the next free one in runs/.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[FIELD=VALUE]…", help="Config overrides, such as steps=20.")
]


def _print_version(requested: bool) -> None:
    if requested:
        from agentfly import __version__

        print(f"agentfly {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language-model agents with reinforcement learning."""


app.command()(run.run)


@app.command(cls=_TrainCommand)
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe: a name, or a Python file with `agent`, `tasks` and `config`.")
    ] = None,
    changes: Overrides = None,
    run: RunFolder = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this directory.")] = None,
    from_step: Annotated[int | None, typer.Option(help="Resume from this checkpoint instead of the newest.")] = None,
    on: Annotated[str | None, typer.Option(help="verl: train on a Ray cluster, with nodes=N gpus=G.")] = None,
    warm_start: Annotated[
        bool, typer.Option("--warm-start", help="First run the SFT that the recipe declares, and train its model.")
    ] = False,
    help_fields: HelpFields = False,
) -> None:
    """Train an agent from a recipe, or resume a run."""
    if resume is not None:
        changes = [*([] if recipe is None else [recipe]), *(changes or [])]
        if run is not None or on is not None or warm_start or any("=" not in change for change in changes):
            raise ConfigError(
                "a run is resumed as it was started: --resume takes no recipe, no --run, no --on and no --warm-start, "
                "only changes such as steps=200"
            )
        import agentfly.cli.train as training

        training.resume_run(resume, from_step, changes)
        return
    if from_step is not None:
        raise ConfigError("--from-step needs --resume")
    if recipe is None:
        raise ConfigError("give a recipe, or --resume with a run directory")
    selected = recipes.find_recipe(recipe)  # before the imports: a wrong name gets its error at once
    import agentfly.cli.train as training

    training.train_recipe(selected, changes or [], run, on, warm_start=warm_start)


@app.command(cls=_TrainCommand)
def demo(changes: Overrides = None, run: RunFolder = None, help_fields: HelpFields = False) -> None:
    """Train a small agent, without a GPU or a download. It is the recipe `lookup`; a few minutes on two cores."""
    import agentfly.cli.train as training

    training.train_recipe(recipes.find_recipe(recipes.DEMO), changes or [], run)


app.command("eval")(evaluate.evaluate)
app.command()(sft.sft)
app.command()(view.view)
app.command()(serve.serve)
app.command()(serve.gateway)
app.command()(doctor.doctor)
app.command()(report.report)
app.add_typer(template.app, name="template", cls=_Subcommands)
app.add_typer(models.app, name="models", cls=_Subcommands)
app.add_typer(recipes.app, name="recipes", cls=_Subcommands)
app.add_typer(env.app, name="env", cls=_Subcommands)
app.add_typer(mcp.app, name="mcp", cls=_Subcommands)


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE)


def main() -> None:
    """Run a command. An AgentFlyError is printed as a message without a traceback; the exit code is 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot show are replaced
            stream.reconfigure(errors="replace")
    # Threads of a matrix product spin while they wait for each other: leave one core to everything else.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) - 1)))
    if logging.lastResort is not None:  # the handler that writes to standard error if none is configured
        logging.lastResort.setFormatter(_SanitizingFormatter())
    with handle_sigterm():
        try:
            try:
                app()
            finally:
                sys.stdout.flush()
        except AgentFlyError as error:
            _print_error(f"agentfly: {error}")
            sys.exit(2)
        except BaseException as error:
            # Files have names, which their errors are reported with; standard output has none.
            if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT_ERRORS:
                with open(os.devnull, "wb") as devnull:  # else the interpreter fails to flush once more
                    os.dup2(devnull.fileno(), sys.stdout.fileno())
                _print_error(f"agentfly: the output could not be written: {error.strerror}")
                sys.exit(2)
            # Replaces typer's hook.
            sys.excepthook = lambda *error: _print_error("".join(traceback.format_exception(*error)).rstrip("\n"))
            raise


def _print_error(text: str) -> None:
    """Print to standard error without control characters, which may come from models, tools and servers."""
    print(sanitize(text), file=sys.stderr)


class _SanitizingFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record))


if __name__ == "__main__":
    main()
