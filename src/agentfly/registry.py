"""Registry of decorated functions by name, for recipes and the command line. Includes entry points by name."""

from __future__ import annotations

import difflib
import weakref
from typing import Any, Generic, Protocol, TypeVar

from agentfly import plugins
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

    def __init__(self, kind: str, group: str) -> None:
        """`group`: entry points whose modules define more of them; imported when their name is asked for."""
        self._kind = kind
        self._group = group
        self._items: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()

    def add(self, item: T) -> None:
        self._items[item.reference] = item

    def find(self, name: str) -> T:
        """Look up a name or a full reference; a name with two different definitions is an error."""
        if name in self._items:
            return self._items[name]
        entry = self._load_entry(name.rpartition(":")[2])
        if name in self._items:
            return self._items[name]
        items = list(self._items.values())
        found = {i.reference: i for i in items if name in (i.name, i.reference.rpartition(":")[2])}
        if hasattr(entry, "reference"):  # else it is a function that returns one
            found[entry.reference] = entry
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            raise ConfigError(
                f"{len(found)} different {self._kind}s are named {name!r}: {', '.join(sorted(found))}; "
                "ask for one by its full reference"
            )
        known = sorted({i.name for i in items} | {each.name for each in plugins.list_plugins(self._group)})
        close = difflib.get_close_matches(name, known, 3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"no {self._kind} is named {name!r}; there are: {', '.join(known) or 'none'}.{hint}")

    def _load_entry(self, name: str) -> Any:
        """Load the entry point of this name, or `Class.method` of an installed environment; None if there is none."""
        plugin = plugins.find_plugin(self._group, name)
        if plugin is not None:
            return plugin.load()
        env_class, _, method = name.partition(".")
        plugin = plugins.find_plugin(plugins.ENVIRONMENTS, env_class) if method else None
        return getattr(plugin.load(), method, None) if plugin is not None else None
