"""The solution's process: runs what a model wrote, and does with its objects what the tests ask.

All of this is at the solution's mercy. It decides what it answers, and nothing more.
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

from .peer import Borrowed, Broken, Peer
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


class _Callback(Borrowed):
    """A function of the tests, which the solution may call."""

    def __init__(self, number: int, peer: Peer) -> None:
        self._number, self._peer = number, peer

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, *args, **kwargs)


def live(channel: socket.socket) -> None:
    """Be the solution, in a fresh child of the tests' process, with nothing of what that has open."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in (0, 1, 2):
        os.dup2(nothing, place)
    kept = channel.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 16)
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    sys.path.insert(0, os.getcwd())
    peer = Peer(channel, lambda number: _Callback(number, peer), lambda value: True, BaseException)
    peer.operations.update(_operations())
    with contextlib.suppress(Broken):
        peer.serve()


def _operations() -> dict[str, Any]:
    module = types.ModuleType("solution")
    found: dict[str, Any] = {name: getattr(operator, name) for name in _OPERATORS.split()}
    found.update({name: getattr(builtins, name) for name in _BUILTINS.split()})
    found.update({name: getattr(math, name) for name in ("trunc", "floor", "ceil")})
    found.update({"copy": copy.copy, "deepcopy": copy.deepcopy, "plain": plain_value})

    def load(source: str) -> None:
        sys.modules["solution"] = module  # dataclasses and pickle look for it there
        exec(compile(source, "solution.py", "exec", 0, True), module.__dict__)

    def name(wanted: str) -> tuple[str, Any]:
        """What the solution calls so: an exception class, which the tests must have one like, or whatever it is."""
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
        import asyncio  # late: few solutions need it, and it takes longer to load than all the rest

        return asyncio.run(coroutine)

    def leave(manager: Any, error: BaseException | None) -> Any:
        return type(manager).__exit__(manager, type(error) if error else None, error, None)

    def enter(manager: Any) -> Any:
        return type(manager).__enter__(manager)

    for function in (load, name, call, finish, leave, enter):
        found[function.__name__] = function
    return found
