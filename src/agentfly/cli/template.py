"""`agentfly template`: check chat templates."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Check chat templates.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="Local folder or hub name with a tokenizer.")],
    name: Annotated[
        str | None, typer.Option("--template", help="Template by name; default: the tokenizer's own.")
    ] = None,
) -> None:
    """Report, property by property, whether a model's chat template can be extended exactly."""
    from rich.console import Console

    from agentfly.models import resolve
    from agentfly.templates.check import check as check_template

    report = check_template(resolve(model), name)
    Console().print(report)
    raise typer.Exit(0 if report.ok else 1)
