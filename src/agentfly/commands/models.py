"""`agentfly models`: which models can be had without a hub, prepared and checked."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Models that need no hub: which there are, prepared, checked.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@app.callback()
def show(context: typer.Context) -> None:
    """Say which models can be had without a hub, and where they are."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from agentfly.models import PREPARED, fault

    table = Table("model", "parameters", "on disk", "licence", "", "from", title="models", title_justify="left")
    for model in PREPARED.values():
        state = fault(model) if model.folder.exists() else ""
        mark = f"[red]{escape(state)}[/]" if state else "[green]ready[/]" if model.folder.exists() else "not prepared"
        parameters, size = f"{model.parameters / 1e6:.0f} M", f"{model.size / 1e6:.0f} MB"
        table.add_row(model.name, parameters, size, model.licence, mark, model.source)
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)
    for model in PREPARED.values():
        print(f"{model.name}: {model.folder}")
    print("A model is also a local folder, or a name on the Hugging Face hub.")


@app.command()
def prepare(name: Annotated[str, typer.Argument(help="smollm2-135m or tiny.")]) -> None:
    """Make a model ready, or find that it is; print its folder."""
    from agentfly.models import prepared_model, ready

    print(ready(prepared_model(name), thorough=True))


@app.command()
def check(name: Annotated[str | None, typer.Argument(help="One model; else all that are prepared.")] = None) -> None:
    """Compare every byte of what is prepared with what was written."""
    from agentfly.models import PREPARED, fault, prepared_model

    chosen = [m for m in PREPARED.values() if m.folder.exists()] if name is None else [prepared_model(name)]
    faults = {model.name: fault(model, thorough=True) for model in chosen}
    for each, wrong in faults.items():
        print(f"{each}: {wrong}. `agentfly models prepare {each}` makes it anew" if wrong else f"{each}: good")
    if not chosen:
        print("No model is prepared; `agentfly models` lists them.")
    raise typer.Exit(1 if any(faults.values()) else 0)
