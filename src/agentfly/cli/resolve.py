"""Resolves names from the command line: environments by entry point, module or file, and what a recipe defines."""

from __future__ import annotations

import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from agentfly import plugins
from agentfly.agent import BaseAgent
from agentfly.environment import Environment, Pool, validate_constructor
from agentfly.errors import AgentFlyError, ConfigError, DataError, describe
from agentfly.tooling import Tool

T = TypeVar("T")


def list_environments() -> tuple[dict[str, type[Environment]], list[ConfigError]]:
    """Return the environments of all installed packages by name, and why others cannot be loaded."""
    loaded: dict[str, type[Environment]] = {}
    errors: list[ConfigError] = []
    for name in dict.fromkeys(plugin.name for plugin in plugins.list_plugins(plugins.ENVIRONMENTS)):
        try:
            loaded[name] = _load_environment(name)
        except ConfigError as error:
            errors.append(error)
    return loaded, errors


def resolve_environment(name: str) -> type[Environment]:
    """Return the environment class for `Name`, `name_in_snake_case`, `module:Class` or `path/to/file.py:Class`."""
    source, _, class_name = name.rpartition(":") if ":" in name else (name, "", "")
    if ":" not in name and not source.endswith(".py"):
        env_class = _load_environment(name)
    else:
        available = {key: member for key, member in list_members(source).items() if inspect.isclass(member)}
        if class_name not in available and (class_name or len(available) != 1):
            problem = f"there is no environment {class_name!r} in" if class_name else "choose an environment of"
            listing = f"there are {', '.join(available) or 'none'}.{_hint(class_name, available)}"
            raise ConfigError(f"{problem} {source}; {listing}")
        env_class = available[class_name] if class_name else next(iter(available.values()))
    validate_constructor(env_class)
    if not isinstance(env_class.pool, Pool):
        raise ConfigError(f"{env_class.__name__}.pool is {env_class.pool!r}; write pool = Pool(…)")
    return env_class


def list_members(source: str) -> dict[str, Tool | type[Environment]]:
    """Return the environments and tools that a module, or a Python file, defines or imports, by name."""
    is_file = source.endswith(".py")
    module = load_module(Path(source), "file") if is_file else import_here(source, f"module {source!r}")
    return {
        key: member
        for key, member in vars(module).items()
        if isinstance(member, Tool)
        or (inspect.isclass(member) and issubclass(member, Environment) and member is not Environment)
    }


def _load_environment(name: str) -> type[Environment]:
    """Load an installed environment by its name, in any case and with or without underscores."""
    installed = plugins.list_plugins(plugins.ENVIRONMENTS)
    same = [plugin for plugin in installed if plugin.name == name]
    plugin = plugins.select_plugin(
        same or [plugin for plugin in installed if _normalize(plugin.name) == _normalize(name)]
    )
    if plugin is None:
        names = list(dict.fromkeys(plugin.name for plugin in installed))
        raise ConfigError(
            f"there is no environment {name!r} in the installed packages; there are {', '.join(names) or 'none'}; "
            f"or give module:Class or path/to/file.py:Class.{_hint(name, names)}"
        )
    env_class = plugin.load()
    if not (inspect.isclass(env_class) and issubclass(env_class, Environment)):
        raise ConfigError(f"{plugin} is not a subclass of Environment")
    return env_class


def _hint(name: str, available: Iterable[str]) -> str:
    close = difflib.get_close_matches(_normalize(name), map(_normalize, available), 3)
    names = [candidate for candidate in available if _normalize(candidate) in close]
    return f" Did you mean {' or '.join(names)}?" if name and names else ""


def _normalize(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def import_here(module: str, what: str) -> ModuleType:
    """Import an installed module, or one of the current folder; error messages call it `what`."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the {what} cannot be imported: {describe(error)}") from error


def allow_imports_from(folder: Path) -> None:
    """Let later imports find the modules of a folder; last, so that a file named like a package does not hide it."""
    if (entry := str(folder.resolve())) not in sys.path:
        sys.path.append(entry)


class _UncachedLoader(importlib.machinery.SourceFileLoader):
    """Loads a file without leaving a `__pycache__` next to it."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        pass


def load_module(path: Path, what: str, installed_as: str = "") -> ModuleType:
    """Execute a Python file and return its module; error messages call it `what`.

    `installed_as`: name of an installed recipe. A file of the user's may import modules of its folder.
    """
    if not path.is_file():
        raise DataError(f"there is no {what} {str(path)!r}")
    if path.suffix != ".py":
        raise DataError(f"{path} is not a Python file")
    name = f"recipe_{installed_as or path.stem}"
    loader = _UncachedLoader(name, str(path.absolute()))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if not installed_as:
        allow_imports_from(path.parent)
    run_user_code(path, lambda: loader.exec_module(module))
    return module


def make_agent(module: ModuleType, **model: Any) -> BaseAgent:
    """Return the agent of a recipe: `agent` itself, or the result of the function of that name.

    `model` may hold model_name_or_path, backend, backend_config and template; they are passed to the function. An
    existing agent cannot take them.
    """
    path, agent = Path(str(module.__file__)), getattr(module, "agent", None)
    if isinstance(agent, BaseAgent) and model:
        fields = ", ".join(model).replace("model_name_or_path", "model")
        raise ConfigError(
            f"{path} defines an agent, so {fields} cannot be set from outside; "
            "write `def agent(**model): return HFAgent(**model, …)` in it instead"
        )
    if callable(agent) and not isinstance(agent, BaseAgent):
        factory = agent
        try:
            inspect.signature(factory).bind(**model)
        except TypeError as error:
            names = ", ".join(model) or "nothing"
            raise ConfigError(
                f"`agent` in {path} cannot be called with {names} ({error}); write `def agent(**model)`"
            ) from None
        agent = run_user_code(path, lambda: factory(**model))
    if not isinstance(agent, BaseAgent):
        raise ConfigError(f"{path} must define `agent`: an agent, or a function that returns one")
    return agent


def agent_accepts(module: ModuleType, name: str) -> bool:
    """Whether a recipe's `agent` is a function with this keyword parameter."""
    try:
        inspect.signature(getattr(module, "agent", None)).bind_partial(**{name: None})  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def run_user_code(path: Path, function: Callable[[], T]) -> T:
    """Call a function of the user's file. Errors become a ConfigError with a traceback that starts in the file."""
    try:
        return function()
    except AgentFlyError:
        raise
    except (Exception, SystemExit) as error:  # SystemExit: otherwise a check of the file would end as if it had passed
        lines = traceback.TracebackException.from_exception(error)
        recipe_frames = [i for i, frame in enumerate(lines.stack) if Path(frame.filename).resolve() == path.resolve()]
        lines.stack[:] = lines.stack[recipe_frames[0] :] if recipe_frames else []
        message = (
            "".join(lines.format()).partition("\n")[2] if recipe_frames else "".join(lines.format_exception_only())
        )
        raise ConfigError(f"{path} failed\n{message.rstrip()}") from error
