"""`agentfly doctor`: report which sandboxes work on this machine."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Report which sandboxes work on this machine, and why the others do not."""
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from agentfly.extras import find_package_conflict
    from agentfly.sandbox import probe_mechanisms

    columns = ("sandbox", "", "finding", "memory", "not limited", "boundary")
    table = Table(*columns, title="doctor", title_justify="left")
    for verdict in asyncio.run(probe_mechanisms()):
        held = verdict.capabilities
        mark = "[green]works[/]" if verdict.ok else "[red]no[/]"
        details = (held.memory, ", ".join(held.unenforced_limits), held.boundary) if held else ()
        table.add_row(verdict.mechanism, mark, verdict.reason, *details)
    Console().print(table)
    if conflict := find_package_conflict():
        Console().print(conflict, style="red", highlight=False, markup=False)
        raise typer.Exit(1)
