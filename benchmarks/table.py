"""Markdown tables, to be copied into the lab book."""

from collections.abc import Sequence
from itertools import zip_longest


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and a table; a row may have fewer cells."""
    widths = [max(map(len, column)) for column in zip_longest(header, *rows, fillvalue="")]
    print(f"\n**{title}**\n")
    for row in (header, ["-" * width for width in widths], *rows):
        cells = [cell.ljust(width) for cell, width in zip([*row, *[""] * len(widths)], widths, strict=False)]
        print("| " + " | ".join(cells) + " |")
    print(flush=True)
