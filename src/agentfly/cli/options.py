"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Row = Annotated[str | None, typer.Option(help="Tasks of the file or recipe: 0:10 (the first ten), 3, or an id.")]
TemplateName = Annotated[str | None, typer.Option(help="Chat template by name; default: the tokenizer's own.")]
BaseUrl = Annotated[str | None, typer.Option(help="URL of the server, for --backend client.")]
MaxTurns = Annotated[int | None, typer.Option(help="Maximum number of turns in a chain.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Maximum number of tokens in a turn; default: that of the recipe, or 1024.")
]
