"""What a person names on the command line: an environment, by its name, by module, or by file; and recipes."""

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
from agentfly.environment import Environment, Pool, refuse_unmakable
from agentfly.errors import AgentFlyError, ConfigError, DataError, describe

T = TypeVar("T")


def prebuilt() -> dict[str, type[Environment]]:
    """The environments that come with AgentFly, by name."""
    return _environments({name: getattr(environments, name) for name in environments.__all__})


def environment(name: str) -> type[Environment]:
    """The environment called `Name`, `name_in_snake_case`, `module:Class` or `path/to/file.py:Class`."""
    source, _, wanted = name.rpartition(":") if ":" in name else (name, "", "")
    if source.endswith(".py"):
        kind = _chosen(source, wanted, _environments(vars(load(Path(source), "file"))))
    elif wanted:
        kind = _chosen(source, wanted, _environments(vars(_imported(source))))
    else:
        there = prebuilt()
        found = [each for each in there if _plain(each) == _plain(name)]
        kind = _chosen(
            "AgentFly", found[0] if found else name, there, "; or give module:Class or path/to/file.py:Class"
        )
    refuse_unmakable(kind)
    if not isinstance(kind.pool, Pool):
        raise ConfigError(f"{kind.__name__}.pool is {kind.pool!r}; write pool = Pool(…)")
    return kind


def _chosen(source: str, wanted: str, there: Mapping[str, type[Environment]], or_else: str = "") -> type[Environment]:
    if wanted in there:
        return there[wanted]
    if not wanted and len(there) == 1:
        return next(iter(there.values()))
    close = [each for each in there if _plain(each) in difflib.get_close_matches(_plain(wanted), map(_plain, there), 3)]
    hint = f" Did you mean {' or '.join(close)}?" if wanted and close else ""
    asked = (
        f"there is no environment {wanted!r} in {source}" if wanted else f"say which environment of {source} you mean"
    )
    raise ConfigError(f"{asked}; there are {', '.join(there) or 'none'}{or_else}.{hint}")


def _environments(names: Mapping[str, object]) -> dict[str, type[Environment]]:
    kinds = {name: each for name, each in names.items() if inspect.isclass(each) and issubclass(each, Environment)}
    return {name: kind for name, kind in kinds.items() if kind is not Environment}


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _imported(module: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(f"the module {module!r} cannot be imported: {describe(error)}") from error


def load(path: Path, what: str) -> ModuleType:
    """Run a Python file of the user's; `what` it is to him goes into the messages."""
    if not path.is_file():
        raise DataError(f"there is no {what} {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise DataError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent.resolve()))  # last: a file named after a package does not hide the package
    loader = spec.loader
    of_the_file(path, lambda: loader.exec_module(module))
    return module


def make_agent(module: ModuleType, **model: Any) -> BaseAgent:
    """The agent of a recipe: `agent` itself, or what a function of that name makes.

    `model` may hold model_name_or_path, backend, backend_config and template. They go to the function as keywords; an
    agent that is there already cannot take them.
    """
    path, agent = Path(str(module.__file__)), getattr(module, "agent", None)
    if isinstance(agent, BaseAgent) and model:
        raise ConfigError(
            f"{path} makes its own agent, so {', '.join(model)} cannot be given beside it; "
            "write `def agent(**model): return HFAgent(**model, …)` in it instead"
        )
    if callable(agent) and not isinstance(agent, BaseAgent):
        make = agent
        try:
            inspect.signature(make).bind(**model)
        except TypeError as error:
            asked = ", ".join(model) or "nothing"
            raise ConfigError(
                f"`agent` in {path} cannot be called with {asked} ({error}); write `def agent(**model)`"
            ) from None
        agent = of_the_file(path, lambda: make(**model))
    if not isinstance(agent, BaseAgent):
        raise ConfigError(f"{path} must define `agent`: an agent, or a function that makes one")
    return agent


def takes(module: ModuleType, name: str) -> bool:
    """Whether a recipe's `agent` is a function that may be told this of the model."""
    try:
        inspect.signature(getattr(module, "agent", None)).bind_partial(**{name: None})  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def of_the_file(path: Path, step: Callable[[], T]) -> T:
    """Run code of the file's. What it raises is told from the file's own lines on."""
    try:
        return step()
    except AgentFlyError:
        raise
    except Exception as error:
        lines = traceback.TracebackException.from_exception(error)
        own = [i for i, frame in enumerate(lines.stack) if Path(frame.filename).resolve() == path.resolve()]
        lines.stack[:] = lines.stack[own[0] :] if own else []
        told = "".join(lines.format()).partition("\n")[2] if own else "".join(lines.format_exception_only())
        raise ConfigError(f"{path} failed\n{told.rstrip()}") from error
