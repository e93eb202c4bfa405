"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agentfly.errors import ConfigError

Row = Annotated[str | None, typer.Option(help="Tasks of the file or recipe: 0:10 (the first ten), 3, or an id.")]
TemplateName = Annotated[str | None, typer.Option(help="Chat template by name; default: the tokenizer's own.")]
BaseUrl = Annotated[str | None, typer.Option(help="URL of the server, for --backend client.")]
MaxTurns = Annotated[int | None, typer.Option(help="Maximum number of turns in a chain.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Maximum number of tokens in a turn; default: that of the recipe, or 1024.")
]

Question = Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the file that is the question.")]
RowFormat = Annotated[
    str | None, typer.Option("--format", help="Row format: agentfly, verl, trl or sharegpt; default: detected.")
]
Rename = Annotated[
    list[str] | None, typer.Option(metavar="OLD=NEW", help="Rename a column of the file. May be repeated.")
]
Split = Annotated[str | None, typer.Option(help="Split of a Hugging Face dataset.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Read only the first N rows; a hub dataset is then streamed.")]


def parse_reading(
    question: str | None, row_format: str | None, rename: Sequence[str] | None, split: str | None, limit: int | None
) -> dict[str, Any]:
    """Collect the options of `read_tasks` that were given. Raises ConfigError for a pair that is not OLD=NEW."""
    new_names: dict[str, str] = {}
    for pair in rename or ():
        old, _, new = pair.partition("=")
        if not old or not new:
            raise ConfigError(f"--rename {pair}: write OLD=NEW")
        new_names[old] = new
    reading: dict[str, Any] = {"question": question, "format": row_format, "split": split, "limit": limit}
    reading["rename"] = new_names or None
    return {name: value for name, value in reading.items() if value is not None}
