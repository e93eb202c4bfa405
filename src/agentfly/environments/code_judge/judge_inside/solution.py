"""The solution's process: runs the generated code, and performs the operations on its objects that the tests request.

The solution controls everything here. It decides what it replies, and nothing else.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import ctypes
import inspect
import math
import operator
import os
import socket
import sys
import types
from typing import Any

from .peer import Broken, Peer, RemoteObject
from .plain import class_names, plain_value

_SET_DUMPABLE = 4
_OPERATORS = (
    "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift lt le gt ge eq ne "
    "neg pos abs invert index contains getitem setitem delitem"
)
_BUILTINS = (
    "len iter next bool str repr hash int float complex round reversed format dir "
    "getattr setattr delattr isinstance issubclass"
)


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
    own = channel.fileno()
    os.closerange(3, own)
    os.closerange(own + 1, 1 << 16)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    sys.path.insert(0, os.getcwd())
    peer = Peer(channel, lambda number: _Callback(number, peer), lambda value: True, BaseException)
    peer.operations.update(_operations())
    with contextlib.suppress(Broken):
        peer.serve()


def _operations() -> dict[str, Any]:
    module = types.ModuleType("solution")
    operations: dict[str, Any] = {name: getattr(operator, name) for name in _OPERATORS.split()}
    operations.update({name: getattr(builtins, name) for name in _BUILTINS.split()})
    operations.update({name: getattr(math, name) for name in ("trunc", "floor", "ceil")})
    operations.update({"copy": copy.copy, "deepcopy": copy.deepcopy, "plain": plain_value})

    def load(source: str) -> None:
        sys.modules["solution"] = module  # dataclasses and pickle look for it there
        exec(compile(source, "solution.py", "exec", 0, True), module.__dict__)

    def name(wanted: str) -> tuple[str, Any]:
        """Return a global of the solution; of an exception class the names, from which the tests make one like it."""
        if wanted not in module.__dict__:
            return "missing", None
        value = module.__dict__[wanted]
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
        operations[function.__name__] = function
    return operations
