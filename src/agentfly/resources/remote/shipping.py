"""Making a class, or the arguments of a call, ready for the way out.

What can be imported at the other end goes by name; what cannot (a class of `__main__`, of a recipe, of a function's
body) goes by value. Of a `@tool` method only the function goes, so that the other end needs no schema.
"""

from __future__ import annotations

import contextlib
import io
import operator
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from agentfly.environment import Environment, Pool
from agentfly.errors import ConfigError, describe
from agentfly.tooling import Context, Tool

MOST = 1 << 30
"""Most bytes of one request."""
_EVERYWHERE = frozenset({"agentfly", "cloudpickle", "__main__", *sys.stdlib_module_names})
"""What never needs to go by value; cloudpickle itself sees to `__main__`."""
_REGISTERING = threading.RLock()


def surroundings() -> dict[str, Any]:
    """What a worker on this machine must know to find what this process finds."""
    return {"path": [os.path.abspath(each) for each in sys.path], "folder": os.getcwd(), "environ": dict(os.environ)}


def dumps(value: Any, by_value: tuple[ModuleType, ...], what: str) -> bytes:
    """The value pickled, with what belongs to these modules by value; ConfigError says `what` cannot be sent."""
    buffer = io.BytesIO()
    try:
        with _registered(by_value):
            _Shipper(buffer).dump(value)
    except Exception as error:  # whatever the value's own methods raise
        raise ConfigError(f"{what} cannot be sent to a worker: {describe(error)}") from error
    if buffer.tell() > MOST:
        raise ConfigError(f"{what} cannot be sent to a worker: it takes {buffer.tell() >> 20} MB; {MOST >> 20} may go")
    return buffer.getvalue()


def modules_by_value(kind: type[Environment], everything: bool) -> tuple[ModuleType, ...]:
    """The modules of a class and its bases that the other end cannot import.

    With `everything` that is theirs and all others of the user's; what is installed, the other end must have too.
    """
    names = dict.fromkeys(each.__module__ for each in kind.__mro__)
    if everything:
        names = dict.fromkeys(name.partition(".")[0] for name in names)
        names |= dict.fromkeys(name for name, module in list(sys.modules.items()) if _is_the_users(name, module))
    own = [name for name in names if name.partition(".")[0] not in _EVERYWHERE]
    return tuple(sys.modules[name] for name in own if name in sys.modules and (everything or not _importable(name)))


def _is_the_users(name: str, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return "." not in name and file is not None and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def _importable(name: str) -> bool:
    """Whether a process with the same search path would import the same file by this name."""
    path, spec, whole = None, None, ""
    for part in name.split("."):
        whole = f"{whole}.{part}".lstrip(".")
        found = (finder.find_spec(whole, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(sys.modules[name], "__file__", None)


@contextlib.contextmanager
def _registered(modules: tuple[ModuleType, ...]) -> Iterator[None]:
    with _REGISTERING:
        ours = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in ours:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in ours:
                cloudpickle.unregister_pickle_by_value(module)


class _Shipper(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves at home what only the host has a use for."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tool):
            return operator.getitem, ((obj.function,), 0)  # the function itself, in words every Python knows
        if isinstance(obj, Pool):
            return Pool, ()
        if isinstance(obj, Context):
            seen = {name: getattr(obj, name) for name in ("task", "group", "chain", "turn", "chain_id", "metadata")}
            return SimpleNamespace(**seen).__reduce__()
        return super().reducer_override(obj)
