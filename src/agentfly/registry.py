"""Registry of decorated functions by name, for recipes and the command line."""

from __future__ import annotations

import difflib
import importlib
import weakref
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from agentfly.errors import ConfigError


class Named(Protocol):
    """A decorated function."""

    name: str

    @property
    def reference(self) -> str:
        """`module:qualified.name`, which finds it unambiguously."""


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """Weak references to all decorated functions. Defining one again at the same place replaces it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._items: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()
        self._lazy: dict[str, str] = {}
        """Names defined in modules that `find` imports on demand: name to module."""

    def add_lazy(self, modules: Mapping[str, str]) -> None:
        """Declare names with the modules that define them, without importing these."""
        self._lazy.update(modules)

    def add(self, item: T) -> None:
        self._items[item.reference] = item

    def find(self, name: str) -> T:
        """Look up a name or a full reference; a name with two different definitions is an error."""
        if module := self._lazy.get(name.rpartition(":")[2]):
            importlib.import_module(module)
        if name in self._items:
            return self._items[name]
        items = list(self._items.values())
        found = {i.reference: i for i in items if name in (i.name, i.reference.rpartition(":")[2])}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            raise ConfigError(
                f"{len(found)} different {self._kind}s are named {name!r}: {', '.join(sorted(found))}; "
                "ask for one by its full reference"
            )
        known = sorted({i.name for i in items} | set(self._lazy))
        close = difflib.get_close_matches(name, known, 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"no {self._kind} is named {name!r}; imported so far: {', '.join(known) or 'none'}.{hint}")
