"""`agentfly doctor`: which sandboxes work on this machine; whether a recipe can train here, or on verl; memory."""

from __future__ import annotations

from typing import Annotated

import typer

from agentfly.errors import ConfigError


def doctor(
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe: check everything that training it needs, up to one sampled chain.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="RECIPE_OR_MODEL", help="Plan the memory of training this instead; no GPU is needed."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=VALUE]…", help="Config overrides, such as lora_rank=16; for --on verl, nodes=2 gpus=8."
        ),
    ] = None,
    device_gib: Annotated[
        float | None,
        typer.Option(min=0, help="GPU memory in GiB to plan for with --memory; default: this machine's device."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="SYSTEM", help="Check instead whether `train --on SYSTEM` can work here, such as verl."),
    ] = None,
) -> None:
    """Report which sandboxes work; with a recipe, whether it can train here. Exits with 1 if something fails."""
    if recipe is not None and "=" in recipe:  # the first override, without a recipe
        changes = [recipe, *(changes or [])]
        recipe = None
    if recipe is not None:
        if memory is not None or on is not None or device_gib is not None:
            raise ConfigError("with a recipe, doctor checks everything here: leave out --memory, --device-gib and --on")
        from agentfly.cli.recipes import find_recipe

        selected = find_recipe(recipe)
        from agentfly.cli.preflight import run_preflight
        from agentfly.training.config import parse_overrides, validate_overrides

        overrides = parse_overrides(changes or [])
        validate_overrides(overrides)
        raise typer.Exit(0 if run_preflight(selected, overrides) else 1)
    if on is not None and (memory is not None or device_gib is not None):
        raise ConfigError("--on has a check of its own: leave out --memory and --device-gib")
    if memory is not None:
        _plan_memory(memory, changes or [], device_gib)
        return
    if on is not None:
        _check_system(on, changes or [])
        return
    if changes or device_gib is not None:
        raise ConfigError("config overrides need --memory RECIPE_OR_MODEL or --on verl; --device-gib needs --memory")
    import asyncio

    from rich.console import Console
    from rich.table import Column, Table

    from agentfly.cli.console import print_text
    from agentfly.plugins import find_package_conflict
    from agentfly.sandbox import probe_mechanisms

    finding = Column("finding", overflow="fold")
    table = Table("sandbox", "", finding, "memory", "not limited", "boundary", title="sandboxes", title_justify="left")
    for verdict in asyncio.run(probe_mechanisms()):
        held = verdict.capabilities
        mark = "[green]works[/]" if verdict.ok else "[red]no[/]"
        details = (held.memory, ", ".join(held.unenforced_limits), held.boundary) if held else ()
        table.add_row(verdict.mechanism, mark, verdict.reason, *details)
    Console().print(table)
    if conflict := find_package_conflict():
        print_text(Console(), conflict, "red")
        raise typer.Exit(1)


def _check_system(name: str, changes: list[str]) -> None:
    """Print what the checks of a system to train on find. Exits with 1 if something does not work."""
    if name != "verl":
        raise ConfigError(f"--on {name}: there is no such system to train on; write --on verl")
    from rich.console import Console

    from agentfly.cli.console import print_check
    from agentfly.integrations.verl.doctor import check_verl
    from agentfly.training.config import parse_overrides

    console = Console()
    works = True
    for what, ok, finding in check_verl(parse_overrides(changes)):
        works &= ok
        print_check(console, what, ok, finding)
    if not works:
        raise typer.Exit(1)


def _plan_memory(recipe_or_model: str, changes: list[str], device_gib: float | None) -> None:
    """Print the memory plan of a recipe, or of a model with the default configuration. Exits with 1 if it does not fit.

    Activations are estimated for a full micro-batch.
    """
    from rich.console import Console
    from rich.table import Table

    from agentfly.cli.console import print_text
    from agentfly.cli.recipes import find_recipe, is_recipe
    from agentfly.cli.run import require_torch
    from agentfly.cli.train import plan_recipe
    from agentfly.training.config import TrainConfig, parse_overrides

    require_torch("doctor --memory")
    overrides = parse_overrides(changes)
    if is_recipe(recipe_or_model):
        config = plan_recipe(find_recipe(recipe_or_model), overrides).config
    else:
        config = TrainConfig(model=recipe_or_model).override(overrides)
    from agentfly.backends.engine.loading import resolve_device
    from agentfly.models import resolve
    from agentfly.training import memory

    device = resolve_device(None)
    total = None if device_gib is None else int(device_gib * memory.GIB)
    plan = memory.estimate_run(resolve(config.model), config, device, total=total)
    where = "this machine's main memory" if total is None and device.type != "cuda" else "GPU"
    title = f"{config.model} on {plan.total / memory.GIB:.1f} GiB ({where})"
    table = Table("part", "GiB", title=title, title_justify="left")
    for name, size in plan.parts.items():
        if size:
            table.add_row(name.replace("_", " "), memory.format_gib(size))
    table.add_row("left", memory.format_gib(plan.left), style="green" if plan.left >= 0 else "red")
    Console().print(table)
    if plan.left < 0:
        fits = "Changes that would make it fit, and what the run takes then:"
        lines = [f"It does not fit. {fits if plan.fitting else memory.NO_CHANGE_FITS + '.'}", *map(str, plan.fitting)]
        print_text(Console(), "\n  ".join(lines))
        raise typer.Exit(1)
