"""What `agentfly env new` does: a small environment that works, to be changed into another."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from rich.console import Console

from agentfly.errors import ConfigError

TEMPLATES = Path(__file__).parent / "starter"
FILES = {"{module}.py": "world.py.jinja", "test_{module}.py": "test.py.jinja", "recipe.py": "recipe.py.jinja"}
TAKEN = {"agent", "any", "config", "earned", "environment", "h_f_agent", "recipe", "row", "task", "tasks", "tool"}
"""Names that what is written uses itself, or that would hide a file of it."""
LONGEST = 24


def begin(name: str, out: Path | None) -> None:
    """Write the files of a new environment, and say what to do with them."""
    module = module_name(name)
    folder = out if out is not None else Path(module)
    world, test, recipe = written(module, folder)
    told = [f"wrote {path}" for path in (world, test, recipe)]
    told += ["", f"agentfly env play {world}", f"agentfly env check {world}"]
    told += [f"pytest {folder}", f"agentfly train {recipe}"]
    Console(highlight=False, soft_wrap=True).print("\n".join(told), markup=False)


def module_name(name: str) -> str:
    """The module that a name means: `tic_tac_toe` for tic-tac-toe and TicTacToe too."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
    fits = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", plain, re.ASCII) and len(plain) <= LONGEST
    if not fits or keyword.iskeyword(plain):
        raise ConfigError(
            f"{name!r:.60} is no name for a module: take at most {LONGEST} letters, digits and _, such as tic_tac_toe"
        )
    if plain in TAKEN or plain in sys.stdlib_module_names or importlib.util.find_spec(plain) is not None:
        raise ConfigError(f"{plain!r} is the name of something else already; take another, such as my_{plain}")
    return plain


def written(module: str, folder: Path) -> list[Path]:
    """Write the files into the folder, none of them over another."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    kind = "".join(map(str.capitalize, module.split("_")))
    names = {"module": module, "kind": kind, "title": module.replace("_", " ").capitalize()}
    paths = {folder / file.format(module=module): template for file, template in FILES.items()}
    if there := [str(path) for path in paths if path.exists() or path.is_symlink()]:
        raise ConfigError(f"{', '.join(there)} is there already; remove it, or name another folder with --out")
    jinja = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in paths.items():
            path.write_text(jinja.get_template(template).render(names))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    return list(paths)
