"""Work of `agentfly env new`: write a small working environment to start from."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from rich.console import Console

from agentfly.errors import ConfigError

TEMPLATES = Path(__file__).parent / "starter"
FILES = {
    "{module}.py": "environment.py.jinja",
    "test_{module}.py": "test.py.jinja",
    "{module}_recipe.py": "recipe.py.jinja",
    "pyproject.toml": "pyproject.toml.jinja",
}
RESERVED = {
    "agent", "any", "config", "direction", "environment", "h_f_agent", "literal", "recipe", "task", "tasks", "tool",
    "tool_call", "train_config",
}  # fmt: skip
"""Module names that would clash with names in the written files."""
MAX_LENGTH = 24


def create_environment(name: str, out: Path | None) -> None:
    """Write the files of a new environment, and print the commands to use it."""
    module = module_name(name)
    folder = out if out is not None else Path(module)
    paths = write_files(module, folder)
    environment, _, recipe, _ = paths
    lines = [f"wrote {path}" for path in paths]
    lines += ["", f"agentfly env play {environment}", f"agentfly env check {environment}"]
    warm = folder / "warm"
    lines += [f"pytest {folder}"]
    # A new model must imitate the expert first: one that never calls the tool is never rewarded.
    lines += [f"agentfly sft {recipe} --model new --expert 300 --steps 28 --learning-rate 1e-3 --out {warm}"]
    lines += [f"agentfly train {recipe} model={warm}", f"pip install --editable {folder}"]
    Console(highlight=False, soft_wrap=True).print("\n".join(lines), markup=False)


def module_name(name: str) -> str:
    """Convert a name to a module name: `tic_tac_toe` for tic-tac-toe and TicTacToe. Raises ConfigError if invalid."""
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
    fits = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", module, re.ASCII) and len(module) <= MAX_LENGTH
    if not fits or keyword.iskeyword(module):
        raise ConfigError(
            f"{name!r:.60} is not a module name: use at most {MAX_LENGTH} letters, digits and _, such as tic_tac_toe"
        )
    if module in RESERVED or module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None:
        raise ConfigError(f"{module!r} is already the name of something else; choose another, such as my_{module}")
    return module


def write_files(module: str, folder: Path) -> list[Path]:
    """Write the files into the folder; raises ConfigError instead of overwriting a file."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    class_name = "".join(map(str.capitalize, module.split("_")))
    names = {"module": module, "class_name": class_name, "title": module.replace("_", " ").capitalize()}
    paths = {folder / file.format(module=module): template for file, template in FILES.items()}
    if existing := [str(path) for path in paths if path.exists() or path.is_symlink()]:
        verb, them = ("already exists", "it") if len(existing) == 1 else ("already exist", "them")
        raise ConfigError(f"{', '.join(existing)} {verb}; remove {them}, or choose another folder with --out")
    jinja = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in paths.items():
            path.write_text(jinja.get_template(template).render(names))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
    return list(paths)
