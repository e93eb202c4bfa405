"""Pickles classes and call arguments for the other end of an RPC connection.

What the other end can import is pickled by name. What it cannot (a class of `__main__`, of a recipe, of a function
body) is pickled by value. Of a `@tool` method only the function is pickled, so the other end needs no schema.
"""

from __future__ import annotations

import io
import operator
import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from agentfly.environment import Environment, Pool
from agentfly.errors import ConfigError, describe
from agentfly.tooling import Context, Tool

MAX_REQUEST = 1 << 30
"""Maximum size of one request in bytes."""
_ALWAYS_BY_NAME = frozenset({"agentfly", "cloudpickle", "__main__", *sys.stdlib_module_names})
"""Packages that are never registered for pickling by value. Cloudpickle itself handles `__main__`."""
_REGISTRY_LOCK = threading.RLock()


def host_state() -> dict[str, Any]:
    """What a worker on this machine takes over to import and find the same files as this process."""
    return {
        "path": [os.path.abspath(folder) for folder in sys.path],
        "folder": os.getcwd(),
        "environ": dict(os.environ),
    }


def dumps(value: Any, by_value: tuple[ModuleType, ...], what: str) -> bytes:
    """Pickle a value, with the contents of the modules `by_value` by value. ConfigError names `what` cannot be sent."""
    buffer = io.BytesIO()
    try:
        with _REGISTRY_LOCK:
            registered = cloudpickle.list_registry_pickle_by_value()
            registered_here = [module for module in by_value if module.__name__ not in registered]
            for module in registered_here:
                cloudpickle.register_pickle_by_value(module)
            try:
                _Pickler(buffer).dump(value)
            finally:
                for module in registered_here:
                    cloudpickle.unregister_pickle_by_value(module)
    except Exception as error:  # pickling runs the value's own methods, which may raise anything
        raise ConfigError(f"{what} cannot be sent to a worker: {describe(error)}") from error
    if buffer.tell() > MAX_REQUEST:
        size, limit = buffer.tell() >> 20, MAX_REQUEST >> 20
        raise ConfigError(f"{what} cannot be sent to a worker: it takes {size} MB; the limit is {limit} MB")
    return buffer.getvalue()


def modules_by_value(env_class: type[Environment], everything: bool) -> tuple[ModuleType, ...]:
    """The modules of a class and its bases that the other end cannot import.

    everything: the other end has none of the user's files, so include all modules outside site-packages. Installed
    packages must be installed at the other end too.
    """
    names = dict.fromkeys(cls.__module__ for cls in env_class.__mro__)
    if everything:
        names = dict.fromkeys(name.partition(".")[0] for name in names)
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if "." not in name and file and not {"site-packages", "dist-packages"} & set(Path(file).parts):
                names[name] = None
    user_names = [name for name in names if name.partition(".")[0] not in _ALWAYS_BY_NAME]
    return tuple(
        sys.modules[name] for name in user_names if name in sys.modules and (everything or not _importable(name))
    )


def _importable(name: str) -> bool:
    """Whether a process with the same search path would import the same file by this name."""
    path, spec, whole = None, None, ""
    for component in name.split("."):
        whole = f"{whole}.{component}".lstrip(".")
        specs = (finder.find_spec(whole, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(sys.modules[name], "__file__", None)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Reduces objects to the part that the other end needs."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tool):
            return operator.getitem, ((obj.function,), 0)  # evaluates to the function, with the standard library only
        if isinstance(obj, Pool):
            return Pool, ()
        if isinstance(obj, Context):
            names = ("task", "group", "chain", "turn", "chain_id", "metadata")
            return SimpleNamespace(**{name: getattr(obj, name) for name in names}).__reduce__()
        return super().reducer_override(obj)
