"""`agentfly run`: run an agent from a recipe or flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentfly.cli.options import (
    BaseUrl,
    Limit,
    MaxTokens,
    MaxTurns,
    Rename,
    Row,
    RowFormat,
    Split,
    Temperature,
    TemplateName,
    parse_reading,
)
from agentfly.cli.recipes import find_recipe
from agentfly.cli.serve import KVMemory


def run(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe: a name, or a Python file with `agent`; optional: `tasks`, `options`.")
    ] = None,
    question: Annotated[
        str | None,
        typer.Option("--question", "-q", help="Question to ask; with --data, the column that is the question."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Tasks: a file, task folders or a Hugging Face dataset."),
    ] = None,
    row_format: RowFormat = None,
    rename: Rename = None,
    split: Split = None,
    limit: Limit = None,
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
    # Before the imports: a wrong name gets its error at once.
    selected = None if recipe is None else find_recipe(recipe)
    import agentfly.cli.run as running

    flags = running.drop_unset(
        agent=agent, model_name_or_path=model, template=template, backend=backend, system_prompt=system_prompt,
        tools=tool, backend_config=running.drop_unset(base_url=base_url or None, kv_memory=kv_memory) or None,
    )  # fmt: skip
    if save is not None:
        running.check_writable(save)
    agent_run = running.build_run(flags) if selected is None else running.load_recipe(selected, flags)
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    options = {"max_turns": max_turns, "num_chains": num_chains, "seed": seed}
    reading = parse_reading(question if data is not None else None, row_format, rename, split, limit)
    agent_run = agent_run.override(
        question if data is None else None, data, row, sampling=sampling, options=options, reading=reading
    )
    result = running.run_and_show(agent_run, tokens=tokens, save=save)
    raise typer.Exit(1 if running.has_only_failures(result) else 0)
