"""`agentfly sft`: fine-tune a model on demonstrations."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from agentfly.cli.options import Limit, Question, Rename, RowFormat, Split, TemplateName, parse_reading
from agentfly.cli.recipes import find_recipe


def sft(
    recipe: Annotated[
        str, typer.Argument(help="Recipe: a name, or a Python file with `agent`; optional: `tasks`, `options`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the model to.")],
    demos: Annotated[Path | None, typer.Option(help="Demonstrations: a file or dataset of conversations.")] = None,
    expert: Annotated[
        int | None, typer.Option(help="Number of tasks that the environment's expert demonstrates.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The expert's tasks: a file, task folders or a dataset; default: the recipe's `tasks`."),
    ] = None,
    question: Question = None,
    row_format: RowFormat = None,
    rename: Rename = None,
    split: Split = None,
    limit: Limit = None,
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
    source = find_recipe(recipe)
    import agentfly.cli.run as running

    running.require_torch("sft")
    from agentfly.cli.sft import NEW, SftConfig, new_model, report_interrupt, run_sft

    reading = parse_reading(question, row_format, rename, split, limit)
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
        reading=reading,
    )
    with report_interrupt(config), new_model(source, data, config) if model == NEW else nullcontext(model) as name:
        agent_run = running.load_recipe(
            source, running.drop_unset(model_name_or_path=name, template=template), without_model=True
        )
        if data is not None or (reading and demos is None):
            agent_run = agent_run.override(data=data, reading=reading if demos is None else None)
        run_sft(agent_run, config)
