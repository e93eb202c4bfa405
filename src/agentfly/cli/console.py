"""Text on the terminal: without control characters, which models, tools, servers and file names may contain."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from agentfly.errors import sanitize


def make_console() -> Console:
    """Create a console; without a terminal, it is wide enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def safe_text(text: str | Text, style: str = "") -> Text:
    """Return text whose control characters are replaced; a `Text` is changed in place."""
    text = Text(text, style) if isinstance(text, str) else text
    text.plain = sanitize(text.plain)
    return text


def print_text(console: Console, text: str | Text, style: str = "") -> None:
    """Print text as it is: without markup, and without line breaks that are not in it."""
    console.print(safe_text(text, style), soft_wrap=True)


def print_check(console: Console, check: str, ok: bool, finding: str, advice: str = "") -> None:
    """Print the result of a check, and below it what to do."""
    mark = ("ok   ", "green") if ok else ("FAILS", "red")
    print_text(console, Text.assemble(mark, f" {check}: {finding}", f"\n      {advice}" if advice else ""))
