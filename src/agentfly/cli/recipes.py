"""`agentfly recipes`: recipes by path, or by the name under which an installed package ships them."""

from __future__ import annotations

import ast
import difflib
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentfly import plugins
from agentfly.errors import ConfigError, DataError

if TYPE_CHECKING:
    from agentfly.training import WarmStart

app = typer.Typer(help="List and copy the installed recipes.", rich_markup_mode=None)
DEMO = "lookup"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe file."""

    path: Path
    installed_as: str = ""
    """Name of the entry point; empty for a file of the user's."""

    @property
    def name(self) -> str:
        """Name of its runs."""
        return self.installed_as or self.path.stem

    @property
    def argument(self) -> str:
        """What a command is given to find the recipe."""
        return self.installed_as or str(self.path)

    def explain_warm_start(self, warm_start: WarmStart | None, model: str) -> str:
        """Why training this recipe cannot begin with its own model, and the commands to run; empty where it can."""
        from agentfly.models import PREPARED

        if model not in PREPARED or warm_start is None:
            return ""
        sft = shlex.join(warm_start.sft_arguments(self.argument))
        train = shlex.join(["train", self.argument])
        return (
            f"{self.name} needs a warm start: its model {model!r} is not trained on such tasks. Run\n"
            f"    agentfly {sft}\n    agentfly {train} model={warm_start.trained_model}\n"
            f"or agentfly {train} --warm-start, which runs both, or give another model with model=; "
            f"model={model} trains this one nevertheless"
        )


def list_requirements(path: Path) -> list[str]:
    """What training a recipe needs, from its literals `requires` and `warm_start`; the file is not executed."""
    values = {
        statement.targets[0].id: statement.value
        for statement in ast.parse(path.read_bytes()).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    requirements = []
    if "requires" in values:
        try:
            extras = ",".join(ast.literal_eval(values["requires"]))
        except (ValueError, TypeError) as error:
            message = f'{path}: `requires` is a tuple of extras, such as requires = ("train", "webshop")'
            raise ConfigError(message) from error
        requirements.append(f"agentfly-rl[{extras}]" if extras else "agentfly-rl")
    return [*requirements, "SFT first"] if "warm_start" in values else requirements


def find_recipe(name_or_path: str) -> Recipe:
    """Find a recipe by path, else by name. Raises DataError that names close ones."""
    path = Path(name_or_path)
    if path.is_file():
        return Recipe(path)
    if plugin := plugins.find_plugin(plugins.RECIPES, name_or_path):
        return Recipe(plugin.locate(), plugin.name)
    names = [plugin.name for plugin in plugins.list_plugins(plugins.RECIPES)]
    environments = {plugin.name.lower(): plugin.name for plugin in plugins.list_plugins(plugins.ENVIRONMENTS)}
    plain = name_or_path.lower().replace("_", "")
    same = [name for name in names if name.replace("_", "") == plain]
    if (file := Path(f"{name_or_path}.py")).is_file():
        hint = f". Did you mean {file}?"
    elif files := sorted(path.glob("*recipe.py")):
        hint = f". {name_or_path} is a folder: give the file of a recipe, such as {files[0]}"
    elif not same and (environment := environments.get(plain)):
        hint = f". {environment} is an environment without a recipe: write a file with `agent`, `tasks` and `config`"
    else:
        close = same or difflib.get_close_matches(path.stem, names, 3)
        hint = f". Did you mean {' or '.join(close)}?" if close else ""
    raise DataError(
        f"there is no recipe {name_or_path!r}: no file of this path, and no installed recipe of this name "
        f"(`agentfly recipes` lists them){hint}"
    )


def is_recipe(name_or_path: str) -> bool:
    """Whether an argument that is a recipe or a model is a recipe."""
    if name_or_path.endswith(".py"):
        return True
    return not Path(name_or_path).exists() and any(
        plugin.name == name_or_path for plugin in plugins.list_plugins(plugins.RECIPES)
    )


@app.callback(invoke_without_command=True)
def list_command(context: typer.Context) -> None:
    """List the installed recipes, or copy one to edit it."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Column, Table

    from agentfly.cli.console import make_console, print_text, safe_text

    console = make_console()
    table = Table(
        Column("recipe", no_wrap=True),
        "description",
        Column("needs", min_width=24, overflow="fold"),
        box=None,
        header_style="dim",
    )
    problems = []
    for name in dict.fromkeys(plugin.name for plugin in plugins.list_plugins(plugins.RECIPES)):
        try:
            plugin = plugins.find_plugin(plugins.RECIPES, name)
            assert plugin is not None
            text = plugin.documentation()
            needs = list_requirements(plugin.locate())
        except ConfigError as error:
            problems.append(str(error))
            continue
        table.add_row(*(safe_text(cell) for cell in (name, text.partition("\n")[0], ", ".join(needs))))
    console.print(table)
    for problem in problems:
        print_text(console, problem, "red")
    print_text(
        console,
        "\nagentfly train NAME trains one, or prints the commands of the SFT it needs first; --warm-start runs them.\n"
        "agentfly recipes copy NAME writes it to NAME.py for editing.",
    )


@app.command("copy")
def copy_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of an installed recipe.")],
    path: Annotated[Path | None, typer.Argument(help="File or folder to write; default: NAME.py, here.")] = None,
) -> None:
    """Copy a recipe to a file that you can edit."""
    recipe = find_recipe(name)
    target = path or Path(f"{recipe.name}.py")
    if target.is_dir():
        target = target / f"{recipe.name}.py"
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} already exists; remove it, or give another path")
    try:
        shutil.copyfile(recipe.path, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    print(f"wrote {target}; train it with: agentfly train {target}")
