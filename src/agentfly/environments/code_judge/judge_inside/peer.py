"""Requests and replies between the tests process and the solution process, one at a time, and the solution's end.

Either side may send requests of its own before it replies. The solution controls everything in its own process: it
decides what it replies, and nothing else.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import ctypes
import inspect
import json
import math
import operator
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from agentfly.sandbox.inside.frames import DATA, BrokenFrame, pack, receive

from .plain import Reader, Writer, class_names, plain_value

_MAX_BYTES = 16 << 20
_SET_DUMPABLE = 4
_OPERATORS = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge eq ne "
    "neg pos abs invert index contains getitem setitem delitem"
)
_BUILTINS = (
    "len iter next bool str repr hash int float complex round reversed format dir "
    "getattr setattr delattr isinstance issubclass"
)


class Broken(BaseException):
    """The other process cannot reply any more. Not an Exception: a test must not take it for one of the solution's."""


class RemoteObject:
    """A reference to an object of the other process, which knows it by its number."""

    __slots__ = ()
    _number: int


class Peer:
    """One end of the connection. Objects that the other side has references to are kept here by number."""

    def __init__(
        self,
        channel: socket.socket,
        make_reference: Callable[[int], Any],
        may_export: Callable[[Any], bool],
        caught: type[BaseException],
    ) -> None:
        """Create one end of a connection.

        Args:
            channel: A connected socket.
            make_reference: Returns the reference to an object of the other side, given its number.
            may_export: Whether the other side may get a reference to an object.
            caught: Exceptions of this type, raised by a request, are sent as its reply.
        """
        self._channel = channel
        self._caught = caught
        self._make_reference = make_reference
        self._may_export = may_export
        self._exports: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.operations: dict[str, Callable[..., Any]] = {}
        """Operations that the other side may request."""
        self.broken = ""
        """Why no more requests can be sent. Empty while the connection works."""

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Request an operation of the other side and return its value, or raise its exception."""
        if self.broken:
            raise Broken(self.broken)
        writer = Writer(self._export)
        positional = [writer.write(argument) for argument in args]
        named = {name: writer.write(value) for name, value in kwargs.items()}
        try:
            self._send([operation, positional, named])
            reply = self._receive()
            while not isinstance(reply, dict):  # a request of the other side
                self._reply(*reply)
                reply = self._receive()
            reader = Reader(self._import, writer.containers)
            value = reader.read(reply["value"])
            if reply["raised"] and not isinstance(value, BaseException):
                raise Broken("it raised something that is not an exception")
            # The call may have changed the containers that it received.
            for container, items in zip(list(writer.containers), reply["after"]):  # noqa: B905  (Python 3.9 has no strict)
                reader.fill(container, items)
        except BaseException as error:  # requests and replies are out of step: nothing more can be sent
            self.broken = self.broken or str(error) if isinstance(error, Broken) else f"no answer: {error!r:.200}"
            raise
        if reply["raised"]:
            value._of_solution = True
            raise value
        return value

    def serve(self) -> None:
        """Reply to requests until the other side is gone, which raises Broken."""
        while True:
            self._reply(*self._receive())

    def _reply(self, operation: str, positional: list[Any], named: dict[str, Any]) -> None:
        reader = Reader(self._import)
        args = [reader.read(argument) for argument in positional]
        kwargs = {name: reader.read(argument) for name, argument in named.items()}
        raised = False
        try:
            value = self.operations[operation](*args, **kwargs)
        except Broken:
            raise
        except self._caught as error:
            raised = True
            value = error
        writer = Writer(self._export, reader.containers)
        try:
            written = writer.write(value)
        except Exception as error:
            raised = True
            written = writer.write(TypeError(f"what was returned cannot be sent: {error}"))
        # Only the containers of the request: those of the reply are in it.
        contents = [writer.write_items(container) for container in reader.containers]
        self._send({"value": written, "raised": raised, "after": contents})

    def _export(self, value: Any) -> Any:
        """Encode an object that is not plain data as a reference."""
        if isinstance(value, RemoteObject):
            return {"yours": value._number}
        if not self._may_export(value):
            raise TypeError(
                f"a {type(value).__name__} cannot be given to the solution; give it plain data or a function"
            )
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._exports)
            self._exports.append(value)  # never removed: the number must always mean this object
        return {"mine": self._numbers[id(value)]}

    def _import(self, name: str, number: Any) -> Any:
        """Decode a reference."""
        if name == "yours":
            return self._exports[number]
        if name != "mine" or type(number) is not int:
            raise ValueError(f"{name!r:.60} is not a value")
        return self._make_reference(number)

    # Bytes

    def _send(self, message: Any) -> None:
        try:
            self._channel.sendall(pack(DATA, json.dumps(message).encode()))
        except OSError as error:
            raise Broken("the solution's process has ended") from error

    def _receive(self) -> Any:
        try:
            return json.loads(receive(self._channel, _MAX_BYTES)[1])
        except BrokenFrame as error:
            raise Broken(f"the solution returned too much: {error}") from error
        except (EOFError, OSError) as error:
            raise Broken("the solution's process has ended") from error


class _Callback(RemoteObject):
    """A function of the tests, which the solution may call."""

    def __init__(self, number: int, peer: Peer) -> None:
        self._number, self._peer = number, peer

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, *args, **kwargs)


def serve_solution(channel: socket.socket) -> None:
    """Serve requests on the channel until it is closed. Runs in a forked child of the tests' process.

    First gives up everything that the child has from its parent: session, standard streams, open files.
    """
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    descriptor = channel.fileno()
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 1 << 16)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    sys.path.insert(0, os.getcwd())
    peer = Peer(channel, lambda number: _Callback(number, peer), lambda value: True, BaseException)
    module = types.ModuleType("solution")
    peer.operations.update({name: getattr(operator, name) for name in _OPERATORS.split()})
    peer.operations.update({name: getattr(builtins, name) for name in _BUILTINS.split()})
    peer.operations.update({name: getattr(math, name) for name in ("trunc", "floor", "ceil")})
    peer.operations.update({"copy": copy.copy, "deepcopy": copy.deepcopy, "plain": plain_value})

    def load(source: str) -> None:
        sys.modules["solution"] = module  # dataclasses and pickle look for it there
        exec(compile(source, "solution.py", "exec", 0, True), module.__dict__)

    def name(symbol: str) -> tuple[str, Any]:
        """Return a global of the solution; of an exception class the names, from which the tests make one like it."""
        if symbol not in module.__dict__:
            return "missing", None
        value = module.__dict__[symbol]
        if isinstance(value, type) and issubclass(value, BaseException):
            return "exception", class_names(value)
        return "value", value

    def call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return ("coroutine", value) if inspect.iscoroutine(value) else ("value", value)

    def finish(coroutine: Any) -> Any:
        import asyncio  # late: few solutions need it, and it takes longer to import than everything else

        return asyncio.run(coroutine)

    def leave(manager: Any, error: BaseException | None) -> Any:
        return type(manager).__exit__(manager, type(error) if error else None, error, None)

    def enter(manager: Any) -> Any:
        return type(manager).__enter__(manager)

    for function in (load, name, call, finish, leave, enter):
        peer.operations[function.__name__] = function
    with contextlib.suppress(Broken):
        peer.serve()
