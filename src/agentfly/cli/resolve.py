"""Resolves names from the command line: environments by name, module or file, and recipe files."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from agentfly import environments
from agentfly.agent import BaseAgent
from agentfly.environment import Environment, Pool, validate_constructor
from agentfly.errors import AgentFlyError, ConfigError, DataError, describe

T = TypeVar("T")


def list_prebuilt_environments() -> dict[str, type[Environment]]:
    """Return the prebuilt environments by name."""
    return _environments({name: getattr(environments, name) for name in environments.__all__})


def resolve_environment(name: str) -> type[Environment]:
    """Return the environment class for `Name`, `name_in_snake_case`, `module:Class` or `path/to/file.py:Class`."""
    source, _, wanted = name.rpartition(":") if ":" in name else (name, "", "")
    if source.endswith(".py"):
        env_class = _select(source, wanted, _environments(vars(load_module(Path(source), "file"))))
    elif wanted:
        env_class = _select(source, wanted, _environments(vars(_import(source))))
    else:
        prebuilt = list_prebuilt_environments()
        found = [each for each in prebuilt if _normalize(each) == _normalize(name)]
        env_class = _select(
            "AgentFly", found[0] if found else name, prebuilt, "; or give module:Class or path/to/file.py:Class"
        )
    validate_constructor(env_class)
    if not isinstance(env_class.pool, Pool):
        raise ConfigError(f"{env_class.__name__}.pool is {env_class.pool!r}; write pool = Pool(…)")
    return env_class


def _select(
    source: str, wanted: str, available: Mapping[str, type[Environment]], or_else: str = ""
) -> type[Environment]:
    if wanted in available:
        return available[wanted]
    if not wanted and len(available) == 1:
        return next(iter(available.values()))
    close = [
        each
        for each in available
        if _normalize(each) in difflib.get_close_matches(_normalize(wanted), map(_normalize, available), 3)
    ]
    hint = f" Did you mean {' or '.join(close)}?" if wanted and close else ""
    problem = f"there is no environment {wanted!r} in {source}" if wanted else f"choose an environment of {source}"
    raise ConfigError(f"{problem}; there are {', '.join(available) or 'none'}{or_else}.{hint}")


def _environments(names: Mapping[str, object]) -> dict[str, type[Environment]]:
    env_classes = {
        name: each for name, each in names.items() if inspect.isclass(each) and issubclass(each, Environment)
    }
    return {name: env_class for name, env_class in env_classes.items() if env_class is not Environment}


def _normalize(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _import(module: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"the module {module!r} cannot be imported: {describe(error)}") from error


def load_module(path: Path, what: str) -> ModuleType:
    """Execute a Python file and return its module; error messages call it `what`."""
    if not path.is_file():
        raise DataError(f"there is no {what} {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent.resolve()))  # at the end: a file named like a package must not shadow the package
    loader = spec.loader
    run_user_code(path, lambda: loader.exec_module(module))
    return module


def make_agent(module: ModuleType, **model: Any) -> BaseAgent:
    """Return the agent of a recipe: `agent` itself, or the result of the function of that name.

    `model` may hold model_name_or_path, backend, backend_config and template; they are passed to the function. An
    existing agent cannot take them.
    """
    path, agent = Path(str(module.__file__)), getattr(module, "agent", None)
    if isinstance(agent, BaseAgent) and model:
        raise ConfigError(
            f"{path} defines an agent, so {', '.join(model)} cannot be set from outside; "
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
    except Exception as error:
        lines = traceback.TracebackException.from_exception(error)
        own = [i for i, frame in enumerate(lines.stack) if Path(frame.filename).resolve() == path.resolve()]
        lines.stack[:] = lines.stack[own[0] :] if own else []
        message = "".join(lines.format()).partition("\n")[2] if own else "".join(lines.format_exception_only())
        raise ConfigError(f"{path} failed\n{message.rstrip()}") from error
