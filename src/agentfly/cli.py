"""The command line. Arguments are parsed first; what a command needs is imported after."""

from __future__ import annotations

import io
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from agentfly.commands.models import app as models
from agentfly.commands.searching import app as search

app = typer.Typer(
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
template = typer.Typer(help="Chat templates.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(template, name="template")
app.add_typer(models, name="models")
app.add_typer(search, name="search")
env = typer.Typer(
    help="Environments: which there are, started, played by hand, checked, begun, watched.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(env, name="env")

EnvironmentName = Annotated[
    str, typer.Argument(metavar="NAME", help="A prebuilt one by name, module:Class, or path/to/file.py:Class.")
]
TaskQuestion = Annotated[str | None, typer.Option("--question", "-q", help="The question it is reset for.")]
TaskFile = Annotated[Path | None, typer.Option("--task", help="A file of tasks, one of which it is reset for.")]
TaskRow = Annotated[str | None, typer.Option(help="Which task of the file: a number or an id; else the first.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"agentfly {version('agentfly')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language-model agents with reinforcement learning."""


@app.command()
def run(
    recipe: Annotated[
        Path | None, typer.Argument(help="A Python file with `agent`, perhaps `tasks` and `options`.")
    ] = None,
    question: Annotated[str | None, typer.Option("--question", "-q", help="What to ask.")] = None,
    data: Annotated[Path | None, typer.Option(help="A file of tasks: JSON, JSON lines, CSV or parquet.")] = None,
    row: Annotated[str | None, typer.Option(help="Which tasks of the file: 3, 0:10, or an id.")] = None,
    model: Annotated[str | None, typer.Option(help="A local folder, a hub name, or the name a server knows.")] = None,
    agent: Annotated[str | None, typer.Option(help="hf (the default), react, code or action.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="A tool by name, or as module:name. May be repeated.")] = None,
    template: Annotated[str | None, typer.Option(help="A chat template by name; else the tokenizer's own.")] = None,
    backend: Annotated[str | None, typer.Option(help="transformers (the default), vllm, client or scripted.")] = None,
    base_url: Annotated[str | None, typer.Option(help="The server of --backend client.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Goes before the question.")] = None,
    max_turns: Annotated[int | None, typer.Option(help="Replies of the model in a chain.")] = None,
    num_chains: Annotated[int | None, typer.Option("--num-chains", "-n", help="Chains for each task.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one reply.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed repeats a run.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print all tokens, coloured by who wrote them.")] = False,
    save: Annotated[Path | None, typer.Option(help="Write the trajectories to this file as JSON lines.")] = None,
) -> None:
    """Run one agent and watch it: from a recipe file or from flags, on a question or on rows of a data set."""
    import agentfly.commands.running as running

    flags = running.given(
        model_name_or_path=model, template=template, backend=backend, system_prompt=system_prompt, tools=tool,
        backend_config={"base_url": base_url} if base_url else None,
    )  # fmt: skip
    if save is not None:
        running.refuse_unwritable(save)
    if recipe is not None:
        chosen = running.recipe(recipe, flags if agent is None else {"agent": agent, **flags})
    else:
        chosen = running.from_flags(agent or "hf", flags)
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    options = {"max_turns": max_turns, "num_chains": num_chains, "seed": seed}
    chosen = chosen.overridden(question, data, row, sampling, options)
    result = running.show(chosen, tokens=tokens, save=save)
    raise typer.Exit(1 if running.nothing_came_of(result) else 0)


@app.command()
def train(
    recipe: Annotated[Path | None, typer.Argument(help="A Python file with `agent`, `tasks` and `config`.")] = None,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[FIELD=VALUE]…", help="Fields of the config, such as steps=20.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="The folder of the run; else the next free one in runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    from_step: Annotated[int | None, typer.Option(help="With --resume: after this step, not the newest.")] = None,
) -> None:
    """Train an agent, from a recipe; or go on with a run that was stopped."""
    import agentfly.commands.training as training
    from agentfly.errors import ConfigError

    if resume is not None:
        if recipe is not None or run is not None:
            raise ConfigError("a run is resumed as it was started: --resume takes no recipe, no changes and no --run")
        training.resumed(resume, from_step)
        return
    if from_step is not None:
        raise ConfigError("--from-step goes with --resume")
    if recipe is None:
        raise ConfigError("give a recipe to start from, or --resume with the folder of a run")
    training.trained(recipe, changes or [], run)


@app.command("eval")
def evaluate(
    recipe_or_model: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_MODEL", help="A recipe (a Python file), or a model as --model takes it.")
    ],
    data: Annotated[Path | None, typer.Option(help="A file of held-out tasks; else the recipe's `eval_tasks`.")] = None,
    row: Annotated[str | None, typer.Option(help="Which tasks of it: 3, 0:10, or an id.")] = None,
    chains: Annotated[int | None, typer.Option("--chains", "-n", help="Chains for each task: the k of pass@k.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="One more chain of each task, at temperature 0.")] = False,
    by: Annotated[list[str] | None, typer.Option(help="A column to show apart by its values. May be repeated.")] = None,
    threshold: Annotated[float, typer.Option(help="The reward from which a chain is a success.")] = 1.0,
    leave_out_unscored: Annotated[
        bool, typer.Option("--leave-out-unscored", help="Chains without a reward do not count; else they count as 0.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder or .jsonl file for finished chains; one that is there is gone on with."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of a recipe whose `agent` is a function: another model.")] = None,
    backend: Annotated[str | None, typer.Option(help="transformers (the default), vllm or client.")] = None,
    base_url: Annotated[str | None, typer.Option(help="The server of --backend client.")] = None,
    template: Annotated[str | None, typer.Option(help="A chat template by name; else the tokenizer's own.")] = None,
    agent: Annotated[str | None, typer.Option(help="Without a recipe: hf (the default), react, code, action.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="Without a recipe: a tool, also as module:name.")] = None,
    reward: Annotated[str | None, typer.Option(help="Without a recipe: a reward, also as module:name.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Without a recipe: goes before the question.")] = None,
    max_turns: Annotated[int | None, typer.Option(help="Replies of the model in a chain.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Chains at once; else all.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one reply.")] = None,
    seed: Annotated[int | None, typer.Option(help="0 unless given: two models meet the same draws.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say how well an agent does on held-out tasks: rewards, pass@k, intervals, and what broke."""
    import agentfly.commands.evaluating as evaluating
    import agentfly.commands.running as running

    flags = running.given(
        model_name_or_path=model, template=template, backend=backend, system_prompt=system_prompt, tools=tool,
        backend_config={"base_url": base_url} if base_url else None, reward=reward,
    )  # fmt: skip
    options = {"max_turns": max_turns, "num_chains": chains, "seed": seed, "max_concurrent_chains": max_concurrent}
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    unscored: Any = "leave out" if leave_out_unscored else "zero"
    asked = evaluating.Asked(greedy, threshold, unscored, by or (), out)
    evaluating.refuse_wrong_flags(asked, sampling, options)
    if recipe_or_model.endswith(".py"):
        beside = flags if agent is None else {"agent": agent, **flags}
        chosen = running.recipe(Path(recipe_or_model), beside, ("eval_tasks", "tasks"))
    else:
        chosen = running.from_flags(agent or "hf", {"model_name_or_path": recipe_or_model, **flags})
    chosen = chosen.overridden(None, data, row, sampling, options)
    found = evaluating.evaluated(chosen, asked, as_json=as_json)
    raise typer.Exit(1 if evaluating.nothing_came_of(found) else 0)


@app.command()
def sft(
    recipe: Annotated[Path, typer.Argument(help="A Python file with `agent`, perhaps `tasks` and `options`.")],
    out: Annotated[Path, typer.Option(help="The folder that the model is written to.")],
    demos: Annotated[Path | None, typer.Option(help="Conversations to imitate: rows with `messages`.")] = None,
    expert: Annotated[int | None, typer.Option(help="Have the environment's expert do so many tasks.")] = None,
    data: Annotated[Path | None, typer.Option(help="Tasks for the expert; else the recipe's `tasks`.")] = None,
    threshold: Annotated[float, typer.Option(help="The reward from which the expert's chain is imitated.")] = 1.0,
    model: Annotated[
        str | None,
        typer.Option(help="Of a recipe whose `agent` is a function: the model; `new` is a tiny one, from scratch."),
    ] = None,
    template: Annotated[str | None, typer.Option(help="A chat template by name; else the tokenizer's own.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 100,
    batch_size: Annotated[int, typer.Option(min=1, help="Demonstrations in each step.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="At its height; it falls to 0 at the last step.")] = 1e-5,
    held_out: Annotated[float, typer.Option(help="The share of demonstrations that is only looked at.")] = 0.1,
    reading: Annotated[
        float, typer.Option(help="What a token counts that the model reads, against 1; more than 0 for a new model.")
    ] = 0.0,
    save_every: Annotated[int | None, typer.Option(min=1, help="Write the model so far as OUT-STEP, too.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed repeats a run.")] = 0,
) -> None:
    """Let a model imitate demonstrations: of a file, or of the expert of its environment."""
    import agentfly.commands.running as running

    running.refuse_without_torch("sft")
    import agentfly.commands.imitating as imitating

    lesson = imitating.Lesson(
        out, demos, expert, threshold, steps, batch_size, learning_rate, held_out, reading, save_every, seed
    )
    made = imitating.new_model(recipe, data, lesson) if model == imitating.NEW else nullcontext(model)
    with made as name:
        chosen = running.recipe(recipe, running.given(model_name_or_path=name, template=template), unheard=True)
        if data is not None:
            chosen = chosen.overridden(None, data, None, {}, {})
        imitating.taught(chosen, lesson)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A local folder, a hub name, or one of `agentfly models`.")],
    flags: Annotated[list[str] | None, typer.Argument(help="After --: further flags of `vllm serve`.")] = None,
    host: Annotated[str, typer.Option(help="0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; else what is quick here.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="Have vLLM read tool calls, say hermes's.")] = None,
    updatable: Annotated[bool, typer.Option("--updatable", help="Whoever reaches it may change the weights.")] = False,
) -> None:
    """Serve a model with vLLM, for `backend="client"`, until Ctrl-C."""
    from agentfly.commands import serving

    served = serving.Served(model, host, port, dtype, tool_parser, updatable, serving.flags_of(flags or ()))
    raise typer.Exit(serving.serve(served))


@app.command()
def doctor() -> None:
    """Say which sandboxes work on this machine, and why the others do not."""
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from agentfly.resources.sandbox import verdicts

    columns = ("sandbox", "", "what was found", "memory", "not limited", "boundary")
    table = Table(*columns, title="doctor", title_justify="left")
    for verdict in asyncio.run(verdicts()):
        held = verdict.capabilities
        mark = "[green]works[/]" if verdict.ok else "[red]no[/]"
        figures = (held.memory, ", ".join(held.not_limited), held.boundary) if held else ()
        table.add_row(verdict.mechanism, mark, verdict.reason, *figures)
    Console().print(table)


@env.command("list")
def list_environments(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them, with its tools in full.")] = None,
) -> None:
    """Say which environments come with AgentFly; or, of one, what its tools are."""
    from agentfly.commands import loading, worlds

    worlds.show(loading.prebuilt().values() if name is None else [loading.environment(name)], tools=name is not None)


@env.command("start")
def start_environment(
    name: EnvironmentName,
    instances: Annotated[int, typer.Option("--instances", "-n", min=1, help="How many.")] = 1,
    question: TaskQuestion = None,
    task: TaskFile = None,
    row: TaskRow = None,
    once: Annotated[bool, typer.Option("--once", help="Close them once it is said how they started.")] = False,
) -> None:
    """Start instances, say how that went, and hold them until Ctrl-C."""
    from agentfly.commands import loading, worlds

    kind = loading.environment(name)
    chosen = worlds.task_of(kind, question, task, row)
    raise typer.Exit(0 if worlds.start(kind, instances, chosen, once=once) else 1)


@env.command("play")
def play_environment(
    name: EnvironmentName, question: TaskQuestion = None, task: TaskFile = None, row: TaskRow = None
) -> None:
    """Act in an environment by hand, and see what a model would see."""
    from agentfly.commands import loading, playing, worlds

    kind = loading.environment(name)
    playing.play(kind, worlds.task_of(kind, question, task, row))


@env.command("check")
def check_environment(
    name: EnvironmentName,
    tasks: Annotated[Path | None, typer.Option(help="A file of tasks; else it draws its own.")] = None,
    seed: Annotated[int, typer.Option(help="What tasks and calls are drawn by.")] = 0,
    instances: Annotated[int, typer.Option("--instances", "-n", min=1, help="How many are used at once.")] = 4,
    seconds: Annotated[float, typer.Option(min=1, help="CPU time that each property may take.")] = 120.0,
) -> None:
    """Run an environment through the contract, and say property by property whether it keeps it."""
    from agentfly.commands import checking, loading

    raise typer.Exit(0 if checking.check(loading.environment(name), tasks, seed, instances, seconds) else 1)


@env.command("new")
def new_environment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called: tic_tac_toe, or TicTacToe.")],
    out: Annotated[Path | None, typer.Option(help="The folder that is written; else one of that name, here.")] = None,
) -> None:
    """Write a small environment that works, with tasks, expert, reward, tests and a recipe, to begin with."""
    from agentfly.commands import beginning

    beginning.begin(name, out)


@env.command("status")
def environment_status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each look.")] = False,
) -> None:
    """Show what your environments on this machine are doing, in whichever process."""
    from agentfly.commands import worlds

    worlds.status(watch=watch, as_json=as_json)


@template.command("check")
def check(
    model: Annotated[str, typer.Argument(help="A local folder or hub name with a tokenizer.")],
    name: Annotated[
        str | None, typer.Option("--template", help="A template by name; else the tokenizer's own.")
    ] = None,
) -> None:
    """Say, property by property, whether a model's chat template can be extended exactly."""
    from rich.console import Console

    from agentfly.models import resolve
    from agentfly.templates.check import check as examine

    report = examine(resolve(model), name)
    Console().print(report)
    raise typer.Exit(0 if report.passed else 1)


def main() -> None:
    """Run a command; an error of the user's is a message, not a traceback."""
    from agentfly.commands.errors import print_error, print_traceback, sanitize_logs
    from agentfly.commands.signals import handle_sigterm
    from agentfly.errors import AgentFlyError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows a mark instead
            stream.reconfigure(errors="replace")
    # Threads of a matrix product wait for each other, spinning: one core is left to everything else that goes on.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) - 1)))
    sanitize_logs()
    with handle_sigterm():
        try:
            app()
        except AgentFlyError as error:
            print_error(f"agentfly: {error}")
            sys.exit(2)
        except BaseException:
            sys.excepthook = print_traceback  # in place of typer's
            raise


if __name__ == "__main__":
    main()
