"""On the host: an object of the environment's own type whose methods are carried out where the instance lives.

Public methods and properties go there. Public attributes are mirrored: each answer tells those that changed. Private
ones do not exist here. An async method stays async; a plain one blocks the thread it is called in, as it always did.
"""

from __future__ import annotations

import asyncio
import builtins
import concurrent.futures
import functools
import inspect
from collections.abc import Callable
from types import MemberDescriptorType, new_class
from typing import Any, Protocol, TypeVar, cast

from agentfly import errors
from agentfly.environment import Environment
from agentfly.errors import AgentFlyError, EnvironmentFault, describe
from agentfly.resources.remote import plain
from agentfly.resources.remote.shipping import dumps, modules_by_value, surroundings

E = TypeVar("E", bound=Environment)
TOO_BIG = "it is too big to be mirrored, and only a plain function, which runs in a thread, can wait for it"
"""Why an attribute that could leave its worker does not."""
_MOST_MIRRORED = 1 << 20
"""Most bytes of mirrored attributes: far more than an honest servant sends."""


class Transport(Protocol):
    """Carries bytes to a Servant and its answer back."""

    async def ask(self, request: bytes) -> bytes:
        """The answer. EnvironmentFault where none will come; a cancellation cancels what was asked."""
        ...


class RemoteError(Exception):
    """What a method raised where its instance lives. Its type has the name, and where there is one the builtin base."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


async def stand_in(kind: type[E], transport: Transport, *, everything: bool = False) -> E:
    """Make an instance of `kind` at the other end of `transport`, and an object that stands in for it here.

    Args:
        kind: The environment's class.
        transport: Leads to a Servant that serves nothing yet.
        everything: Whether the other end has AgentFly and the standard library, but none of the user's files.
    """
    environment, remote = attached(kind, transport, everything=everything)
    shipped = dumps(kind, remote.by_value, kind.__name__)
    await remote.ask("make", "", (None if everything else surroundings(), shipped), {})
    return environment


def attached(kind: type[E], transport: Transport, *, everything: bool = False) -> tuple[E, Remote]:
    """An object that stands in for whatever the other end of `transport` serves, and the way to that."""
    environment: E = object.__new__(_stand_in_class(cast("Any", kind)))
    remote = vars(environment)["_remote"] = Remote(kind, transport, environment, everything)
    return environment, remote


def _refuse_paths(value: Any) -> None:
    """A path would have the host read a file of its own, for a world that may be anybody's by now."""
    pictures = value.get("image") if isinstance(value, dict) else None
    for each in pictures if isinstance(pictures, list | tuple) else [pictures]:
        url = each.get("url") if isinstance(each, dict) else each
        if isinstance(url, str) and not url.startswith(("data:", "https://", "http://")):
            raise TypeError(f"it names a picture by path ({url!r:.80}); it must send bytes or an Image")


class Remote:
    """The way from a stand-in to its instance."""

    def __init__(self, kind: type[Environment], transport: Transport, stand_in: Environment, everything: bool) -> None:
        self.kind, self._transport = kind, transport
        self._mirrored, self.carried = vars(stand_in), vars(type(stand_in))
        self.by_value = modules_by_value(kind, everything)
        self.stays: dict[str, str] = {}
        """Public attributes that cannot be mirrored, and why."""
        self._sizes: dict[str, int] = {}
        self._seen = 0
        self._loop = asyncio.get_running_loop()

    async def ask(self, do: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have something done there; its value, or what it raised."""
        what = f"{self.kind.__name__}.{name}" if name else f"{self.kind.__name__}()"
        request = dumps((self._seen, do, name, args, kwargs), self.by_value, f"what {what} is given")
        data = await self._transport.ask(request)
        try:
            answer = plain.read(data)
            self._mirror(answer["version"], answer["attributes"])
            raised = _rebuilt(answer["error"]) if "error" in answer else None
            value = None if raised else answer["value"]
            _refuse_paths(value)
        except Exception as error:  # the other end may be hostile: there is nothing it could not have sent
            raise EnvironmentFault(f"the answer of {what} cannot be read: {describe(error)}") from error
        if raised:
            raise raised
        return value

    def wait(self, do: str, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The same, blocking this thread, which must not be an event loop's."""
        what = f"{self.kind.__name__}.{name}"
        if _in_event_loop():
            raise RuntimeError(
                f"{what} is carried out in a worker, and waiting for it here would stop the event loop; "
                f"make the caller a plain function, which runs in a thread, or {name} an async method"
            )
        asked = self.ask(do, name, args, kwargs or {})
        if not self._loop.is_running():
            asked.close()
            raise EnvironmentFault(f"{what} cannot be reached: the event loop it was made in does not run any more")
        future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        while True:
            try:
                return future.result(timeout=1.0)
            except concurrent.futures.CancelledError:
                raise EnvironmentFault(f"{what} was cancelled") from None
            except TimeoutError:
                if future.done():
                    return future.result()
                if not self._loop.is_running():
                    raise EnvironmentFault(f"{what} was cut short: its event loop has ended") from None

    def _mirror(self, version: Any, attributes: Any) -> None:
        if type(version) is not int or not isinstance(attributes, dict):
            raise TypeError("no version and attributes")
        if version <= self._seen:  # late: an answer that overtook it told all of this and more
            return
        for name, form in attributes.items():
            if name.startswith("_") or name in self.carried:
                continue
            self._sizes[name] = len(name) + len(plain.write(form, _MOST_MIRRORED))
            if sum(self._sizes.values()) > _MOST_MIRRORED:
                raise ValueError("more attributes than an instance may have mirrored")
            if "is" in form:  # in one step: another thread may be reading it
                self._mirrored[name] = form["is"]
                self.stays.pop(name, None)
            elif "stays" in form or "big" in form:
                self.stays[name] = str(form.get("stays", TOO_BIG))[:200]
            else:
                for kept in (self.stays, self._mirrored, self._sizes):
                    kept.pop(name, None)
        self._seen = version


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_RAISED: dict[str, Any] = {
    name: kind
    for home in (builtins, errors)
    for name, kind in vars(home).items()
    if inspect.isclass(kind)
    and issubclass(kind, Exception)
    and not issubclass(kind, StopIteration | StopAsyncIteration | UnicodeError | BaseExceptionGroup)
}
"""What may be raised in place of what was raised there: made from one text, and meant by nobody as a signal."""


def _rebuilt(told: Any) -> Exception:
    kinds, text, trace = told["kinds"], told["text"], told["trace"]
    if not all(isinstance(each, str) for each in (text, trace, *kinds)):
        raise TypeError("no error in words")
    base = next((_RAISED[name] for name in kinds if name in _RAISED), Exception)
    error = base(text) if issubclass(base, AgentFlyError) else _worded(str(kinds[0])[:100], base)(text)
    error.add_note(f"Where the instance lives:\n{trace}")
    return error


@functools.lru_cache(maxsize=256)
def _worded(name: str, base: type[Any]) -> type[Exception]:
    """A type of this name that reads as it is told, whatever `base` makes of its arguments."""
    return type(name, (RemoteError, base), {})


@functools.lru_cache(maxsize=256)
def _stand_in_class(kind: type[Any]) -> type[Any]:
    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    for name in dir(kind):
        written = inspect.getattr_static(kind, name)
        if name.startswith("__") or not hasattr(type(written), "__get__") or isinstance(written, _WITHOUT_INSTANCE):
            continue
        if name.startswith("_"):
            body[name] = property(_refuse)
        else:
            body[name] = _method(name, written) if callable(written) else _property(name)
    return new_class(kind.__name__, (_Manners, kind), {}, lambda space: space.update(body))


_WITHOUT_INSTANCE = (staticmethod, classmethod, type, MemberDescriptorType)
"""What needs no instance is carried out here; a slot's value is mirrored."""


def _method(name: str, written: Callable[..., Any]) -> Callable[..., Any]:
    written = inspect.unwrap(written)  # a tool is not a coroutine function, the function in it may be

    async def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await vars(self)["_remote"].ask("call", name, args, kwargs)

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_remote"].wait("call", name, args, kwargs)

    return functools.wraps(written)(ask if inspect.iscoroutinefunction(written) else wait)


def _property(name: str) -> property:
    def read(self: Any) -> Any:
        remote = vars(self)["_remote"]
        try:
            return remote.wait("get", name)
        except AttributeError as error:  # Python asks __getattr__ next, which knows no more than this
            remote.stays[name] = f"reading it raised {describe(error)}"
            raise

    return property(read)


def _refuse(_: Any) -> Any:
    raise AttributeError  # Python asks __getattr__ next, which says why


class _Manners:
    """How every stand-in behaves, whatever its class says."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Nothing: a stand-in is no subclass that the class should hear of."""

    def __getattribute__(self, name: str) -> Any:
        remote = object.__getattribute__(self, "__dict__").get("_remote")
        if remote is not None and name in remote.stays and name not in remote.carried:
            raise AttributeError  # before Python finds the class's own value, which is not the instance's
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        """Say why there is no such attribute here."""
        if name in vars(self):  # mirrored, and hidden by the class's slot for it
            return vars(self)[name]
        kind, remote = type(self).__name__, vars(self).get("_remote")
        if name.startswith("_"):
            why = f"{kind}.{name} is private, and exists only in the worker the instance lives in"
        elif remote is not None and remote.stays.get(name) == TOO_BIG and not _in_event_loop():
            return remote.wait("get", name)
        elif remote is not None and name in remote.stays:
            why = f"{kind}.{name} cannot leave its worker: {remote.stays[name]}"
        else:
            raise AttributeError(f"{kind} has no attribute {name!r} in its worker, as of its last answer")
        raise AttributeError(f"{why}; give {kind} a method that returns what you need of it")

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(self).__name__
        raise AttributeError(f"{kind}.{name} is in a worker and cannot be set from here; give {kind} a method for it")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} that lives in a worker can be neither copied nor sent elsewhere")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in a worker>"

    def __del__(self) -> None:
        """Nothing: what the class does at the end of an instance is done in the worker."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__
