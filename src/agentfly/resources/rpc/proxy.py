"""Host side: an object of the environment's own class whose methods run where the instance is.

Public methods and properties are forwarded. Public attributes are mirrored: each answer has those that changed. Private
ones do not exist on the proxy. An async method stays async. A plain one blocks the calling thread.
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
from agentfly.resources.rpc import codec
from agentfly.resources.rpc.serialization import dumps, host_state, modules_by_value

E = TypeVar("E", bound=Environment)
TOO_BIG = "it is too big to be mirrored, and only a plain function, which runs in a thread, can wait for it"
"""Why an attribute is not mirrored although it could be sent."""
_MAX_MIRRORED = 1 << 20
"""Size limit in bytes of the mirrored attributes: far more than a correct server sends."""


class Transport(Protocol):
    """Carries a request to an RpcServer and returns its answer."""

    async def ask(self, request: bytes) -> bytes:
        """The answer. EnvironmentFault if there will be none. A cancellation cancels the request."""


class RemoteError(Exception):
    """An exception raised by a remote method. Its type has the remote name and, if there is one, the builtin base."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


async def make_proxy(env_class: type[E], transport: Transport, *, everything: bool = False) -> E:
    """Create an instance at the other end of `transport`, and a proxy for it.

    Args:
        env_class: The environment's class.
        transport: Leads to an RpcServer without an instance.
        everything: Whether the other end has AgentFly and the standard library, but none of the user's files.
    """
    environment, remote = attach_proxy(env_class, transport, everything=everything)
    pickled_class = dumps(env_class, remote.by_value, env_class.__name__)
    await remote.ask("make", "", (None if everything else host_state(), pickled_class), {})
    return environment


def attach_proxy(env_class: type[E], transport: Transport, *, everything: bool = False) -> tuple[E, Remote]:
    """A proxy for the instance that the other end of `transport` serves, and its connection."""
    environment: E = object.__new__(_proxy_class(cast("Any", env_class)))
    remote = vars(environment)["_remote"] = Remote(env_class, transport, environment, everything)
    return environment, remote


class Remote:
    """The connection from a proxy to its instance."""

    def __init__(
        self, env_class: type[Environment], transport: Transport, proxy: Environment, everything: bool
    ) -> None:
        self.env_class = env_class
        self._transport = transport
        self._mirrored = vars(proxy)
        self.forwarded = vars(type(proxy))
        self.by_value = modules_by_value(env_class, everything)
        self.not_mirrored: dict[str, str] = {}
        """Public attributes that cannot be mirrored, with the reason."""
        self._sizes: dict[str, int] = {}
        self._seen = 0
        self._loop = asyncio.get_running_loop()

    async def ask(self, operation: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute an operation (`make`, `get` or `call`) at the other end; return its value or raise its error."""
        what = f"{self.env_class.__name__}.{name}" if name else f"{self.env_class.__name__}()"
        request = dumps((self._seen, operation, name, args, kwargs), self.by_value, f"what {what} is given")
        data = await self._transport.ask(request)
        try:
            answer = codec.read(data)
            self._mirror(answer["version"], answer["attributes"])
            raised = _rebuild_error(answer["error"]) if "error" in answer else None
            value = None if raised else answer["value"]
            _reject_image_paths(value)
        except Exception as error:  # the other end may be hostile and send anything
            raise EnvironmentFault(f"the answer of {what} cannot be read: {describe(error)}") from error
        if raised:
            raise raised
        return value

    def wait(self, operation: str, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Like `ask`, but blocks the calling thread, which must not run an event loop."""
        what = f"{self.env_class.__name__}.{name}"
        if _in_event_loop():
            raise RuntimeError(
                f"{what} is carried out in a worker, and waiting for it here would stop the event loop; "
                f"make the caller a plain function, which runs in a thread, or {name} an async method"
            )
        request = self.ask(operation, name, args, kwargs or {})
        if not self._loop.is_running():
            request.close()
            raise EnvironmentFault(f"{what} cannot be reached: the event loop it was made in does not run any more")
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        while True:
            try:
                return future.result(timeout=1.0)
            except concurrent.futures.CancelledError:
                raise EnvironmentFault(f"{what} was cancelled") from None
            except TimeoutError:
                if future.done():
                    return future.result()
                if not self._loop.is_running():
                    raise EnvironmentFault(f"{what} was interrupted: its event loop has ended") from None

    def _mirror(self, version: Any, attributes: Any) -> None:
        """Apply the changed attributes of an answer. Raises if they are malformed or too large."""
        if type(version) is not int or not isinstance(attributes, dict):
            raise TypeError("no version and attributes")
        if version <= self._seen:  # an answer that overtook this one had all of these changes
            return
        for name, form in attributes.items():
            if name.startswith("_") or name in self.forwarded:
                continue
            self._sizes[name] = len(name) + len(codec.write(form, _MAX_MIRRORED))
            if sum(self._sizes.values()) > _MAX_MIRRORED:
                raise ValueError("more attributes than an instance may have mirrored")
            if "value" in form:  # set in one step: another thread may be reading it
                self._mirrored[name] = form["value"]
                self.not_mirrored.pop(name, None)
            elif "reason" in form or "too_big" in form:
                self.not_mirrored[name] = str(form.get("reason", TOO_BIG))[:200]
            else:  # deleted
                self.not_mirrored.pop(name, None)
                self._mirrored.pop(name, None)
                self._sizes.pop(name, None)
        self._seen = version


def _reject_image_paths(value: Any) -> None:
    """Raise for an image given by path: the host would read one of its own files for a possibly hostile instance."""
    images = value.get("image") if isinstance(value, dict) else None
    for image in images if isinstance(images, list | tuple) else [images]:
        url = image.get("url") if isinstance(image, dict) else image
        if isinstance(url, str) and not url.startswith(("data:", "https://", "http://")):
            raise TypeError(f"it names an image by path ({url!r:.80}); it must send bytes or an Image")


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_RAISABLE: dict[str, Any] = {
    name: cls
    for home in (builtins, errors)
    for name, cls in vars(home).items()
    if inspect.isclass(cls)
    and issubclass(cls, Exception)
    and not issubclass(cls, StopIteration | StopAsyncIteration | UnicodeError | BaseExceptionGroup)
}
"""Exception types that a remote error may be raised as: those with one text argument and no control-flow meaning."""


def _rebuild_error(encoded: Any) -> Exception:
    """The exception to raise for an encoded remote error."""
    classes, text, trace = encoded["classes"], encoded["text"], encoded["trace"]
    if not all(isinstance(text_field, str) for text_field in (text, trace, *classes)):
        raise TypeError("an error that is not text")
    base = next((_RAISABLE[name] for name in classes if name in _RAISABLE), Exception)
    error = base(text) if issubclass(base, AgentFlyError) else _error_type(str(classes[0])[:100], base)(text)
    error.add_note(f"Where the instance lives:\n{trace}")
    return error


@functools.lru_cache(maxsize=256)
def _error_type(name: str, base: type[Any]) -> type[Exception]:
    """An exception type with this name and base. RemoteError comes first so that str() is the remote text."""
    return type(name, (RemoteError, base), {})


_NOT_FORWARDED = (staticmethod, classmethod, type, MemberDescriptorType)
"""Attributes that need no instance are used locally. The value of a slot is mirrored."""


@functools.lru_cache(maxsize=256)
def _proxy_class(env_class: type[Any]) -> type[Any]:
    """A subclass of the environment class that forwards methods and properties and hides private attributes."""
    body: dict[str, Any] = {name: getattr(env_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    for name in dir(env_class):
        attribute = inspect.getattr_static(env_class, name)
        if name.startswith("__") or not hasattr(type(attribute), "__get__") or isinstance(attribute, _NOT_FORWARDED):
            continue
        if name.startswith("_"):
            body[name] = property(_raise_attribute_error)
        else:
            body[name] = _forward_method(name, attribute) if callable(attribute) else _forward_property(name)
    return new_class(env_class.__name__, (_ProxyBase, env_class), {}, lambda namespace: namespace.update(body))


def _forward_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    method = inspect.unwrap(method)  # a Tool is not a coroutine function, but its function may be one

    async def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await vars(self)["_remote"].ask("call", name, args, kwargs)

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_remote"].wait("call", name, args, kwargs)

    return functools.wraps(method)(ask if inspect.iscoroutinefunction(method) else wait)


def _forward_property(name: str) -> property:
    def read(self: Any) -> Any:
        remote = vars(self)["_remote"]
        try:
            return remote.wait("get", name)
        except AttributeError as error:  # Python calls __getattr__ next, which reports this reason
            remote.not_mirrored[name] = f"reading it raised {describe(error)}"
            raise

    return property(read)


def _raise_attribute_error(_: Any) -> Any:
    raise AttributeError  # Python calls __getattr__ next, which reports the reason


class _ProxyBase:
    """Behavior of every proxy, whatever the environment class defines."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """Do nothing: the environment class must not be notified of its proxy class."""

    def __getattribute__(self, name: str) -> Any:
        remote = object.__getattribute__(self, "__dict__").get("_remote")
        if remote is not None and name in remote.not_mirrored and name not in remote.forwarded:
            raise AttributeError  # before Python finds the class attribute, which is not the instance's value
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        """Explain why the proxy has no such attribute."""
        if name in vars(self):  # mirrored, and hidden by the class's slot for it
            return vars(self)[name]
        cls, remote = type(self).__name__, vars(self).get("_remote")
        if name.startswith("_"):
            reason = f"{cls}.{name} is private, and exists only in the worker the instance lives in"
        elif remote is not None and remote.not_mirrored.get(name) == TOO_BIG and not _in_event_loop():
            return remote.wait("get", name)
        elif remote is not None and name in remote.not_mirrored:
            reason = f"{cls}.{name} cannot leave its worker: {remote.not_mirrored[name]}"
        else:
            raise AttributeError(f"{cls} has no attribute {name!r} in its worker, as of its last answer")
        raise AttributeError(f"{reason}; give {cls} a method that returns what you need of it")

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self).__name__
        raise AttributeError(f"{cls}.{name} is in a worker and cannot be set from here; give {cls} a method for it")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a {type(self).__name__} that lives in a worker can be neither copied nor sent elsewhere")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} in a worker>"

    def __del__(self) -> None:
        """Do nothing: the finalizer of the environment class runs in the worker."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__
