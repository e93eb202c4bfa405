"""Entry points: environments, rewards, tools, recipes, commands and checks that installed packages provide by name.

Each group is named after what it extends. A package declares its entries in its metadata, so they are listed without
importing the package; `Plugin.load` imports one:

    [project.entry-points."agentfly.environments"]
    Maze = "maze.environment:Maze"           # agentfly env list, play, check; agentfly.environments.Maze
    [project.entry-points."agentfly.rewards"]
    maze_solved = "maze.rewards:maze_solved" # reward="maze_solved"; agentfly.rewards.maze_solved
    [project.entry-points."agentfly.tools"]
    maze_walk = "maze.environment:Maze.walk" # tools=["maze_walk"]; agentfly.tools.maze_walk
    [project.entry-points."agentfly.recipes"]
    maze = "maze.recipe"                     # a module: agentfly train maze
    [project.entry-points."agentfly.commands"]
    maze = "maze.cli:app"                    # a typer app: agentfly maze

The environments of this package are declared in the same way, in its pyproject.toml. A `Registry` finds decorated
functions, of entry points and of the running program, by name.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from agentfly.errors import DISTRIBUTION, AgentFlyError, ConfigError, describe

ENVIRONMENTS = "agentfly.environments"
REWARDS = "agentfly.rewards"
TOOLS = "agentfly.tools"
RECIPES = "agentfly.recipes"
COMMANDS = "agentfly.commands"
_LABELS = {
    ENVIRONMENTS: "environment", REWARDS: "reward", TOOLS: "tool", RECIPES: "recipe", COMMANDS: "command",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point."""

    group: str
    name: str
    value: str
    """`module`, or `module:attribute`."""
    distribution: str
    """Name and version of the distribution that declares it."""

    def load(self) -> Any:
        """Import the module and return the attribute. Raises ConfigError that names the distribution if it fails."""
        module, _, attribute = self.value.partition(":")
        try:
            value: Any = importlib.import_module(module.strip())
            for name in filter(None, attribute.strip().split(".")):
                value = getattr(value, name)
        except AgentFlyError:
            raise
        except (Exception, SystemExit) as error:  # a module may be a script that exits
            raise ConfigError(f"{self} cannot be loaded: {describe(error)}") from error
        return value

    def locate(self) -> Path:
        """Return the file of the module, without importing the module or its parent packages."""
        package, *submodules = self.value.partition(":")[0].strip().split(".")
        spec = importlib.util.find_spec(package)
        for name in submodules:
            if spec is None or spec.submodule_search_locations is None:
                break
            spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            raise ConfigError(f"{self} cannot be found: there is no file of this module")
        return Path(spec.origin)

    def documentation(self) -> str:
        """Return the docstring of the module, without importing it."""
        import ast

        try:
            return ast.get_docstring(ast.parse(self.locate().read_bytes())) or ""
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{self} cannot be read: {describe(error)}") from error

    def __str__(self) -> str:
        return f"the {_LABELS[self.group]} {self.name!r} of the package {self.distribution} ({self.value})"


@functools.cache
def list_plugins(group: str) -> tuple[Plugin, ...]:
    """Return the entries of a group, sorted by name. Reads metadata of installed packages once per process."""
    from importlib.metadata import entry_points  # 20 ms, which a process that finds nothing by name does without

    entries = entry_points(group=group)
    plugins = [
        Plugin(group, entry.name, entry.value, f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown")
        for entry in entries
    ]
    return tuple(sorted(plugins, key=lambda plugin: (plugin.name.lower(), plugin.distribution)))


def find_plugin(group: str, name: str) -> Plugin | None:
    """Return the entry of this name, or None. Raises ConfigError if two packages declare the name."""
    return select_plugin([plugin for plugin in list_plugins(group) if plugin.name == name])


def select_plugin(candidates: Iterable[Plugin]) -> Plugin | None:
    """Return the only plugin, or None. Raises ConfigError that names the packages if there are two."""
    plugins = list(candidates)
    if len(plugins) > 1:
        packages = " and ".join(f"{plugin.distribution} ({plugin.value})" for plugin in plugins)
        label = _LABELS[plugins[0].group]
        alternative = "" if label in ("recipe", "command") else ", or give it as module:name"
        raise ConfigError(
            f"{len(plugins)} packages declare the {label} {plugins[0].name!r}: {packages}; uninstall one{alternative}"
        )
    return plugins[0] if plugins else None


def load_attribute(group: str, module: str, name: str) -> Any:
    """Implement `__getattr__` of the module that a group extends. Raises AttributeError for an unknown name."""
    plugin = None if name.startswith("_") else find_plugin(group, name)
    if plugin is None:
        close = difflib.get_close_matches(name, [plugin.name for plugin in list_plugins(group)], 3)
        hint = f". Did you mean {' or '.join(close)}?" if close and not name.startswith("_") else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
    return plugin.load()


def find_package_conflict() -> str:
    """Describe a conflict with the unrelated distribution `agentfly`; empty if it is not installed.

    Both distributions install a package named `agentfly`, so whichever was installed last has overwritten files of the
    other.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        other = version("agentfly")
    except PackageNotFoundError:
        return ""
    return (
        f"The distribution `agentfly` {other} is installed. It is unrelated to this one and overwrites its files: "
        f"pip uninstall -y agentfly {DISTRIBUTION} && pip install {DISTRIBUTION}"
    )


class NamedFunction:
    """A decorated function. Calling it calls the function."""

    kind: ClassVar[str]

    def __init__(self, function: Callable[..., Any], name: str | None, names: Mapping[str, Any] | None) -> None:
        """`names`: local names that string type hints may use."""
        functools.update_wrapper(self, function)
        self.function = function
        self.name: str = name or function.__name__
        self._names = names or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name} of {self.reference}>"

    @property
    def reference(self) -> str:
        """`module:qualified.name`, which finds it unambiguously."""
        return f"{self.function.__module__}:{self.function.__qualname__}"


T = TypeVar("T", bound=NamedFunction)


class Registry(Generic[T]):
    """Weak references to all decorated functions. Defining one again at the same place replaces it."""

    def __init__(self, kind: str, group: str) -> None:
        """`group`: entry points whose modules define more of them; imported when their name is asked for."""
        self._kind = kind
        self._group = group
        self._items: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()

    def add(self, item: T, alias: str = "") -> None:
        """Add an item, under its reference or under another name for it."""
        self._items[alias or item.reference] = item

    def find(self, name: str) -> T:
        """Look up a name or a full reference; a name with two different definitions is an error."""
        if name in self._items:
            return self._items[name]
        # Import the entry point of this name, or that of the environment in `Environment.method`.
        own_name = name.rpartition(":")[2]
        env_class, _, method = own_name.partition(".")
        if plugin := find_plugin(self._group, own_name):
            entry = plugin.load()
        elif method and (plugin := find_plugin(ENVIRONMENTS, env_class)):
            entry = getattr(plugin.load(), method, None)
        else:
            entry = None
        if name in self._items:
            return self._items[name]
        items = list(self._items.values())
        matches = {i.reference: i for i in items if name in (i.name, i.reference.rpartition(":")[2])}
        if hasattr(entry, "reference"):  # else it is a function that returns one
            matches[entry.reference] = entry
        if len(matches) == 1:
            return next(iter(matches.values()))
        if matches:
            raise ConfigError(
                f"{len(matches)} different {self._kind}s are named {name!r}: {', '.join(sorted(matches))}; "
                "ask for one by its full reference"
            )
        names = sorted({i.name for i in items} | {plugin.name for plugin in list_plugins(self._group)})
        close = difflib.get_close_matches(name, names, 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"no {self._kind} is named {name!r}; there are: {', '.join(names) or 'none'}.{hint}")
