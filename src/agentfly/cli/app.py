"""The `agentfly` command. Arguments are parsed first; commands import what they need afterwards."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import traceback
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from agentfly import plugins
from agentfly.cli import doctor, env, mcp, models, recipes, report, serve, template, view
from agentfly.cli.serve import KVMemory
from agentfly.cli.signals import handle_sigterm
from agentfly.errors import AgentFlyError, ConfigError, sanitize


class _Commands(TyperGroup):
    """The commands below, and those that installed packages provide by entry point. One of these is imported only when
    it runs: for the list of commands, its module docstring is read."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in _list_names() if name not in own)]

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
    return list(dict.fromkeys(each.name for each in plugins.list_plugins(plugins.COMMANDS)))


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

            names = [each for each in args[args.index(_HELP_FIELDS) + 1 :] if not each.startswith("-")]
            print_fields(names[0] if names else None)
            ctx.exit()
        options = {name for each in self.get_params(ctx) for name in each.opts}
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

# Options that several commands have.
Row = Annotated[str | None, typer.Option(help="Tasks of the file or recipe: 0:10 (the first ten), 3, or an id.")]
TemplateName = Annotated[str | None, typer.Option(help="Chat template by name; default: the tokenizer's own.")]
BaseUrl = Annotated[str | None, typer.Option(help="URL of the server, for --backend client.")]
MaxTurns = Annotated[int | None, typer.Option(help="Maximum number of turns in a chain.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Maximum number of tokens in a turn; default: that of the recipe, or 1024.")
]
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


@app.command()
def run(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe: a name, or a Python file with `agent`; optional: `tasks`, `options`.")
    ] = None,
    question: Annotated[str | None, typer.Option("--question", "-q", help="Question to ask.")] = None,
    data: Annotated[Path | None, typer.Option(help="File of tasks: JSON, JSON lines, CSV or parquet.")] = None,
    row: Row = None,
    model: Annotated[str | None, typer.Option(help="Local folder, hub name, or model name of a server.")] = None,
    agent: Annotated[str | None, typer.Option(help="hf (the default), react, code, action or vision.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="Tool by name, or as module:name. May be repeated.")] = None,
    template: TemplateName = None,
    backend: Annotated[str | None, typer.Option(help="transformers (the default), vllm, client or scripted.")] = None,
    base_url: BaseUrl = None,
    kv_memory: KVMemory = None,
    system_prompt: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_turns: MaxTurns = None,
    num_chains: Annotated[int | None, typer.Option("--num-chains", "-n", help="Chains per task.")] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print all tokens, colored by author.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the trajectories to this file, as JSON lines.")] = None,
) -> None:
    """Run an agent from a recipe or flags, and show its chains live."""
    found = None if recipe is None else recipes.find_recipe(recipe)
    import agentfly.cli.run as running

    flags = running.drop_unset(
        agent=agent, model_name_or_path=model, template=template, backend=backend, system_prompt=system_prompt,
        tools=tool, backend_config=running.drop_unset(base_url=base_url or None, kv_memory=kv_memory) or None,
    )  # fmt: skip
    if save is not None:
        running.check_writable(save)
    chosen = running.build_run(flags) if found is None else running.load_recipe(found, flags)
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    options = {"max_turns": max_turns, "num_chains": num_chains, "seed": seed}
    chosen = chosen.override(question, data, row, sampling=sampling, options=options)
    result = running.run_and_show(chosen, tokens=tokens, save=save)
    raise typer.Exit(1 if running.has_only_failures(result) else 0)


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
    help_fields: HelpFields = False,
) -> None:
    """Train an agent from a recipe, or resume a run."""
    if resume is not None:
        changes = [*([] if recipe is None else [recipe]), *(changes or [])]
        if run is not None or on is not None or any("=" not in each for each in changes):
            raise ConfigError(
                "a run is resumed as it was started: --resume takes no recipe, no --run and no --on, only changes such "
                "as steps=200"
            )
        import agentfly.cli.train as training

        training.resume_run(resume, from_step, changes)
        return
    if from_step is not None:
        raise ConfigError("--from-step needs --resume")
    if recipe is None:
        raise ConfigError("give a recipe, or --resume with a run directory")
    found = recipes.find_recipe(recipe)  # before the imports: a wrong name gets its error at once
    import agentfly.cli.train as training

    training.train_recipe(found, changes or [], run, on)


@app.command(cls=_TrainCommand)
def demo(changes: Overrides = None, run: RunFolder = None, help_fields: HelpFields = False) -> None:
    """Train a small agent, without a GPU or a download. It is the recipe `lookup`; a few minutes on two cores."""
    import agentfly.cli.train as training

    training.train_recipe(recipes.find_recipe(recipes.DEMO), changes or [], run)


@app.command("eval")
def evaluate(
    recipe_or_model: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_MODEL", help="Recipe (name or Python file), or model as for --model.")
    ],
    data: Annotated[
        Path | None, typer.Option(help="File of held-out tasks; default: the recipe's `eval_tasks`.")
    ] = None,
    row: Row = None,
    chains: Annotated[int | None, typer.Option("--chains", "-n", help="Chains per task: the k of pass@k.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Add one chain per task at temperature 0.")] = False,
    by: Annotated[list[str] | None, typer.Option(help="Column to group results by. May be repeated.")] = None,
    threshold: Annotated[float, typer.Option(help="Minimum reward of a successful chain.")] = 1.0,
    leave_out_unscored: Annotated[
        bool,
        typer.Option("--leave-out-unscored", help="Exclude chains without a reward instead of counting them as 0."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder or .jsonl file for finished chains; an existing one is resumed.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model, for a recipe whose `agent` is a function.")] = None,
    backend: Annotated[str | None, typer.Option(help="transformers (the default), vllm or client.")] = None,
    base_url: BaseUrl = None,
    kv_memory: KVMemory = None,
    template: TemplateName = None,
    agent: Annotated[
        str | None, typer.Option(help="Without a recipe: hf (the default), react, code, action, vision.")
    ] = None,
    tool: Annotated[list[str] | None, typer.Option(help="Without a recipe: tool by name, or as module:name.")] = None,
    reward: Annotated[str | None, typer.Option(help="Without a recipe: reward by name, or as module:name.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Without a recipe: system prompt.")] = None,
    max_turns: MaxTurns = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Maximum number of concurrent chains; default: all.")
    ] = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed; default 0, so that models are compared on the same draws.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Evaluate an agent on held-out tasks. Prints rewards, pass@k, confidence intervals and failures."""
    found = recipes.find_recipe(recipe_or_model) if recipes.is_recipe(recipe_or_model) else None
    import agentfly.cli.evaluate as evaluating
    import agentfly.cli.run as running

    flags = running.drop_unset(
        agent=agent, model_name_or_path=model, template=template, backend=backend, system_prompt=system_prompt,
        tools=tool, reward=reward,
        backend_config=running.drop_unset(base_url=base_url or None, kv_memory=kv_memory) or None,
    )  # fmt: skip
    options = {"max_turns": max_turns, "num_chains": chains, "seed": seed, "max_concurrent_chains": max_concurrent}
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    unscored: Any = "leave out" if leave_out_unscored else "zero"
    asked = evaluating.EvalOptions(greedy, threshold, unscored, by or (), out)
    evaluating.validate_flags(asked, sampling, options)
    if found is not None:
        chosen = running.load_recipe(found, flags, ("eval_tasks", "tasks"))
    else:
        chosen = running.build_run({"model_name_or_path": recipe_or_model, **flags})
    chosen = chosen.override(data=data, row=row, sampling=sampling, options=options)
    result = evaluating.run_evaluation(chosen, asked, as_json=as_json)
    raise typer.Exit(1 if evaluating.has_no_scores(result) else 0)


@app.command()
def sft(
    recipe: Annotated[
        str, typer.Argument(help="Recipe: a name, or a Python file with `agent`; optional: `tasks`, `options`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    demos: Annotated[Path | None, typer.Option(help="File of demonstrations: rows with `messages`.")] = None,
    expert: Annotated[
        int | None, typer.Option(help="Number of tasks that the environment's expert demonstrates.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="File of tasks for the expert; default: the recipe's `tasks`.")
    ] = None,
    threshold: Annotated[float, typer.Option(help="Minimum reward of an expert's chain to be used.")] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(help="Model, for a recipe whose `agent` is a function; `new` is an untrained tiny model."),
    ] = None,
    template: TemplateName = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Demonstrations per step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate; it falls to 0 at the last step.")] = 1e-5,
    validation_fraction: Annotated[
        float, typer.Option(help="Fraction of demonstrations held out for validation.")
    ] = 0.1,
    prompt_loss_weight: Annotated[
        float, typer.Option(help="Loss weight of prompt and observation tokens (0 to 1); above 0 for a new model.")
    ] = 0.0,
    train_tower: Annotated[
        bool, typer.Option("--train-tower", help="Also train the vision tower, which is frozen otherwise.")
    ] = False,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Also write the model every N steps, to OUT-STEP.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Fine-tune a model on demonstrations. They come from a file or from the environment's expert."""
    source = recipes.find_recipe(recipe)
    import agentfly.cli.run as running

    running.require_torch("sft")
    from agentfly.cli.sft import NEW, SftConfig, new_model, report_interrupt, run_sft

    config = SftConfig(
        out,
        demos,
        expert,
        threshold=threshold,
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        validation_fraction=validation_fraction,
        prompt_loss_weight=prompt_loss_weight,
        train_tower=train_tower,
        save_every=save_every,
        seed=seed,
    )
    with report_interrupt(config), new_model(source, data, config) if model == NEW else nullcontext(model) as name:
        chosen = running.load_recipe(
            source, running.drop_unset(model_name_or_path=name, template=template), without_model=True
        )
        if data is not None:
            chosen = chosen.override(data=data)
        run_sft(chosen, config)


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
