"""`agentfly models`: list, build and verify models that need no hub."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="List, build and verify models that need no hub.", invoke_without_command=True, rich_markup_mode=None
)


@app.callback()
def show(context: typer.Context) -> None:
    """List the models that need no hub, their state and their folders."""
    if context.invoked_subcommand is not None:
        return
    from rich.markup import escape
    from rich.table import Table

    from agentfly.cli.console import make_console
    from agentfly.models import PREPARED, find_fault

    table = Table("model", "parameters", "on disk", "license", "", "from", title="models", title_justify="left")
    for model in PREPARED.values():
        fault = find_fault(model) if model.folder.exists() else ""
        state = f"[red]{escape(fault)}[/]" if fault else "[green]ready[/]" if model.folder.exists() else "not prepared"
        parameters = f"{model.parameters / 1e6:.0f} M"
        size = f"{model.size / 1e6:.0f} MB"
        table.add_row(model.name, parameters, size, model.license, state, model.source)
    make_console().print(table)
    for model in PREPARED.values():
        print(f"{model.name}: {model.folder}")
    print("A model can also be a local folder or a name on the Hugging Face hub.")


@app.command()
def prepare(name: Annotated[str, typer.Argument(help="smollm2-135m, tiny, tiny-vision or tiny-vision-find.")]) -> None:
    """Build a model if it is missing or damaged, and print its folder."""
    from agentfly.models import get_model, prepare_model

    print(prepare_model(get_model(name), thorough=True))


@app.command()
def check(name: Annotated[str | None, typer.Argument(help="One model; default: all prepared models.")] = None) -> None:
    """Verify the checksums of prepared models."""
    from agentfly.models import PREPARED, find_fault, get_model

    models = [model for model in PREPARED.values() if model.folder.exists()] if name is None else [get_model(name)]
    faults = {model.name: find_fault(model, thorough=True) for model in models}
    for model_name, fault in faults.items():
        print(
            f"{model_name}: {fault}. Run `agentfly models prepare {model_name}` to rebuild it"
            if fault
            else f"{model_name}: good"
        )
    if not models:
        print("No model is prepared; `agentfly models` lists them.")
    raise typer.Exit(1 if any(faults.values()) else 0)
