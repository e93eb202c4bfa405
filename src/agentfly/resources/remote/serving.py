"""Where an instance lives: requests are carried out, and answered with plain data.

Standard library and cloudpickle only, so that it runs wherever there is a Python. A request is
`(seen, do, name, arguments, keywords)`, pickled; an answer is `{"value" | "error", "version", "attributes"}`. The
attributes are those that changed after version `seen`: an answer that is lost or late is made good by the next.
"""

from __future__ import annotations

import asyncio
import copyreg
import json
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from agentfly.errors import describe
from agentfly.resources.remote.plain import LIMIT, NotPlain, TooBig, write
from agentfly.threads import call

MIRROR_LIMIT = 64 << 10
"""Most bytes of public attributes that are mirrored: every answer costs the time to look through them."""
OWNER = "AGENTFLY_OWNER"
"""The environment variable that names the process a worker belongs to; it stays what it is."""
_MOST_TRACE = 8000
_GONE, _BIG = "{}", '{"big":true}'


class Servant:
    """Serves one instance: the first request makes it, every other acts in it. Several may be under way at once."""

    def __init__(self) -> None:
        self._instance: Any = None
        self._mirror = Mirror()

    async def answer(self, request: bytes) -> bytes:
        """Carry a request out. Whatever that raises is part of the answer; only a cancellation comes through."""
        seen = 0
        try:
            seen, do, name, args, kwargs = pickle.loads(request)
            said = f'"value":{await self._carry_out(do, name, args, kwargs)}'
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            said = f'"error":{_told(error)}'
        try:
            version, attributes = self._mirror.changes(self._instance, seen)
        except Exception as error:  # an instance whose attributes cannot even be listed
            said, version, attributes = f'"error":{_told(error)}', seen, "{}"
        return f'{{{said},"version":{version},"attributes":{attributes}}}'.encode("utf-8", "surrogatepass")

    async def _carry_out(self, do: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if do == "make":
            self._make(*args)
            return "null"
        if do == "get":
            value = await call(getattr, self._instance, name)
        else:
            value = await call(getattr(self._instance, name), *args, **kwargs)
        try:
            return write(value)
        except NotPlain as error:
            raise TypeError(
                f"{type(self._instance).__name__}.{name} returned {error}, which cannot leave its worker; "
                f"return text, numbers, lists, dicts, bytes or images, of at most {LIMIT >> 10} KB"
            ) from None

    def _make(self, surroundings: dict[str, Any] | None, shipped: bytes) -> None:
        if surroundings is not None:
            _move_in(**surroundings)
        self._instance = pickle.loads(shipped)()


def _move_in(path: list[str], folder: str, environ: dict[str, str]) -> None:
    """See the files and settings that the host sees."""
    sys.path[:] = path
    os.chdir(folder)
    for name in set(os.environ) - set(environ) - {OWNER}:
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if name != OWNER})


def _told(error: BaseException) -> str:
    """An error in plain data. The names of its types say what the host may catch it as."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    text = describe(error)[len(kinds[0]) + len(": ") :]
    trace = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    return json.dumps({"kinds": kinds, "text": text[:_MOST_TRACE], "trace": trace})


class Mirror:
    """What the host is told of an instance's public attributes, and since which version."""

    def __init__(self) -> None:
        self._version = 0
        self._told: dict[str, tuple[str, int]] = {}
        """Attribute to its form, and the version in which it became that."""

    def changes(self, instance: Any, seen: int) -> tuple[int, str]:
        """The version of this moment, and as JSON what changed after version `seen`."""
        self._version += 1
        current = dict(self._forms(instance))
        for name in self._told.keys() | current.keys():
            form = current.get(name, _GONE)
            if self._told.get(name, (_GONE,))[0] != form:
                self._told[name] = form, self._version
        changed = {name: form for name, (form, since) in self._told.items() if since > seen}
        self._told = {name: told for name, told in self._told.items() if told[0] != _GONE or name in changed}
        return self._version, "{" + ",".join(f"{json.dumps(name)}:{form}" for name, form in changed.items()) + "}"

    def _forms(self, instance: Any) -> Iterator[tuple[str, str]]:
        left = MIRROR_LIMIT
        for name, value in _public(instance):
            try:
                form = f'{{"is":{write(value, left, pictures=False)}}}'
            except TooBig:
                form = _BIG
            except NotPlain as error:
                form = json.dumps({"stays": f"it is {error}"})
            except RuntimeError:  # it is being changed this very moment: the next answer tells it
                form = self._told.get(name, (_GONE,))[0]
            except Exception as error:  # of a type's own that is nearly plain
                form = json.dumps({"stays": f"looking at it raised {describe(error)}"})
            left = max(left - len(form), 0)
            yield name, form


def _public(instance: Any) -> list[tuple[str, Any]]:
    slots = copyreg._slotnames(type(instance))  # type: ignore[attr-defined]
    found = {name: getattr(instance, name) for name in slots if hasattr(instance, name)}
    found.update(getattr(instance, "__dict__", {}))  # copied: threads may be setting others
    return [(name, value) for name, value in found.items() if name.isidentifier() and not name.startswith("_")]
