"""`agentfly eval`: evaluate an agent on held-out tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from agentfly.cli.options import (
    BaseUrl,
    Limit,
    MaxTokens,
    MaxTurns,
    Question,
    Rename,
    Row,
    RowFormat,
    Split,
    Temperature,
    TemplateName,
    parse_reading,
)
from agentfly.cli.recipes import find_recipe, is_recipe
from agentfly.cli.serve import KVMemory


def evaluate(
    recipe_or_model: Annotated[
        str, typer.Argument(metavar="RECIPE_OR_MODEL", help="Recipe (name or Python file), or model as for --model.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Held-out tasks: a file, task folders or a dataset; default: the recipe's `eval_tasks`."),
    ] = None,
    question: Question = None,
    row_format: RowFormat = None,
    rename: Rename = None,
    split: Split = None,
    limit: Limit = None,
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
    recipe = find_recipe(recipe_or_model) if is_recipe(recipe_or_model) else None
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
    eval_options = evaluating.EvalOptions(greedy, threshold, unscored, by or (), out)
    evaluating.validate_flags(eval_options, sampling, options)
    if recipe is not None:
        agent_run = running.load_recipe(recipe, flags, ("eval_tasks", "tasks"))
    else:
        agent_run = running.build_run({"model_name_or_path": recipe_or_model, **flags})
    reading = parse_reading(question, row_format, rename, split, limit)
    agent_run = agent_run.override(data=data, row=row, sampling=sampling, options=options, reading=reading)
    result = evaluating.run_evaluation(agent_run, eval_options, as_json=as_json)
    raise typer.Exit(1 if evaluating.has_no_scores(result) else 0)
