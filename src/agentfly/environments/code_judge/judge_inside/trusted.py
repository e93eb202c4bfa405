"""The tests' process: the solution's names as handles, and the tests run one by one.

The solution decides what its own objects do. It never decides whether one of them equals plain data, and it is not
shown what the tests compare with: an operation that would tell is done here, on the plain value the object is made on;
only an object that the tests themselves made from a class of the solution is asked.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import operator
import os
import socket
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from . import solution, swallowed
from .peer import Borrowed, Peer
from .plain import exception_class

_SET_DUMPABLE, _GET_DUMPABLE = 4, 3
_MOST_WORDS = 500
_TELLING = (
    "startswith endswith issubset issuperset isdisjoint difference symmetric_difference intersection union "
    "count index find rfind rindex"
)
"""Methods of plain data to which a test gives what it expects."""
_REAL = frozenset(("__name__", "__qualname__", "__dict__", "__annotations__"))
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    functools.partial,
)
_LAZY = (types.CoroutineType, types.GeneratorType)
_ENDS = frozenset(("StopIteration", "StopAsyncIteration", "CancelledError"))
"""Exceptions that end an iterator or a task silently: with StopIteration `all(map(f, cases))` would hold. RuntimeError
replaces them, as in generators (PEP 479), unless the tests name them."""
_space: dict[str, Any] = {"__name__": "tests", swallowed.END: swallowed.report_end}
_failed: list[str] = []
_skipped: list[str] = []
"""Of the step that runs: failed assertions that the solution swallowed, and checks that it kept from being reached."""
_handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
_peer: Peer


class Handle(Borrowed):
    """An object of the solution."""

    __slots__ = ("__weakref__", "_fixed", "_made_by_tests", "_number")

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_fixed", ())
        object.__setattr__(self, "_made_by_tests", False)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        kind, value = _peer.ask("call", self, *args, **kwargs)
        if kind == "coroutine":
            return _finished(value)
        if isinstance(value, Handle) and isinstance(self, Class):
            object.__setattr__(value, "_made_by_tests", True)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _REAL:
            raise AttributeError(name)
        if name in _TELLING.split() and not self._made_by_tests:
            return getattr(_plain(self), name)
        return _peer.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _peer.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        _peer.ask("delattr", self, name)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Handle):
            return _peer.ask("eq", self, other)
        known = _known(self)
        return bool(known) and known[0] == other

    def __ne__(self, other: object) -> Any:
        return _peer.ask("ne", self, other) if isinstance(other, Handle) else not self == other

    def __hash__(self) -> int:
        number: int = _peer.ask("hash", self)
        return number

    def __contains__(self, item: object) -> bool:
        if self._made_by_tests:
            return bool(_peer.ask("contains", self, item))
        return any(each is item or each == item for each in self)  # type: ignore[attr-defined]

    def __enter__(self) -> Any:
        made = self._made_by_tests
        value = _peer.ask("enter", self)
        if value is self:
            object.__setattr__(self, "_made_by_tests", made)
        return value

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        try:
            swallows = bool(_peer.ask("leave", self, error))
        except BaseException as other:
            if error is not None and swallowed.is_failed_check(error):
                if isinstance(other, AssertionError):
                    _return_to_tests(other)
                else:
                    _note_swallowed(error)
            raise
        if swallows and error is not None:
            _note_swallowed(error)
        return swallows

    def __instancecheck__(self, instance: object) -> bool:
        return bool(_peer.ask("isinstance", instance, self))

    def __subclasscheck__(self, kind: object) -> bool:
        return bool(_peer.ask("issubclass", kind, self))

    def __deepcopy__(self, memo: object) -> Any:
        return _peer.ask("deepcopy", self)


class Class(Handle):
    """A name of the solution that the tests write as a class: with a capital, and no underscore."""

    __slots__ = ()


class _Solution(Peer):
    """The solution's process, as the tests ask it."""

    def ask(self, do: str, /, *args: Any, **kwargs: Any) -> Any:
        failed, skipped = len(_failed), len(_skipped)
        try:
            return super().ask(do, *args, **kwargs)
        except BaseException as error:
            del _skipped[skipped:]  # the test itself sees an exception
            if isinstance(error, AssertionError) and len(_failed) > failed:
                del _failed[failed:]
                _return_to_tests(error)
            ends = {kind.__name__ for kind in type(error).__mro__} & _ENDS
            if ends and do != "next" and not any(map(swallowed.names, ends)):
                raise RuntimeError(f"the solution raised {type(error).__name__}") from error
            raise


def _note_swallowed(error: BaseException) -> None:
    """Note what the test loses if the solution swallows this exception of the tests' side."""
    if swallowed.is_failed_check(error):
        _failed.append("the solution swallowed a failed assertion of the test")
    elif check := swallowed.skipped_check(error):
        _skipped.append(f"the solution swallowed {type(error).__name__}, so that this was not reached: {check}")


def _return_to_tests(error: AssertionError) -> None:
    """Take an assertion of the tests that the solution passes on for what it is."""
    vars(error).pop("_of_solution", None)


def _asked(name: str) -> Callable[..., Any]:
    return lambda self, *rest: _peer.ask(name, self, *rest)


def _both(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    """An operator with another value, which may be what the tests expect."""
    here = getattr(operator, name)

    def done(self: Any, other: Any) -> Any:
        made = self._made_by_tests
        if not made and not isinstance(other, Handle):
            return here(other, _plain(self)) if reflected else here(_plain(self), other)
        value = _peer.ask(name, *((other, self) if reflected else (self, other)))
        if isinstance(value, Handle):
            object.__setattr__(value, "_made_by_tests", made)
        return value

    return done


_NO_OTHER_VALUE = (
    "len iter next bool str repr int float complex round reversed format dir neg pos abs invert index "
    "getitem setitem delitem trunc floor ceil copy"
)
_COMPARED = "lt le gt ge"
_COMPUTED = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _name in _NO_OTHER_VALUE.split():
    setattr(Handle, f"__{_name}__", _asked(_name))
for _name in _COMPARED.split():
    setattr(Handle, f"__{_name}__", _both(_name, False))
for _name in _COMPUTED.split():
    setattr(Handle, f"__{_name.strip('_')}__", _both(_name, False))
    setattr(Handle, f"__r{_name.strip('_')}__", _both(_name, True))


def _plain(handle: Handle) -> Any:
    """The plain value that an object is made on, fixed before the solution could know what it is held against."""
    known = _known(handle)
    if not known:
        raise TypeError("the solution returned an object of its own where the test expects plain data")
    return known[0]


def _known(handle: Handle) -> Any:
    """The plain value in a tuple, if there is one. What cannot change is asked for once: a solution that answers first
    1e9 and then -1e9 would lie between any two bounds."""
    known = handle._fixed or _peer.ask("plain", handle)
    if known and isinstance(known[0], (int, float, complex, str, bytes, tuple, frozenset)):
        object.__setattr__(handle, "_fixed", known)
    return known


async def _finished(coroutine: Handle) -> Any:
    return _peer.ask("finish", coroutine)


def _borrowed(number: int) -> Handle:
    """The handle of an object: always the same, so that `is` holds. What the solution hands out counts as its own, even
    where it is the very object that the tests made."""
    handle = _handles.setdefault(number, Handle(number))
    object.__setattr__(handle, "_made_by_tests", False)
    return handle


def close_to_others() -> None:
    """Let nobody look into this process, and import nothing from where a solution may write."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("this process cannot be closed to others")
    folder = os.path.realpath(os.getcwd())
    sys.path[:] = [place for place in sys.path if os.path.commonpath([folder, os.path.realpath(place)]) != folder]


def begin(source: str) -> str:
    """Fork the solution's process and load the solution there; what went wrong in words."""
    global _peer
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            mine.close()
            solution.live(its)
        finally:
            os._exit(0)
    its.close()
    _peer = _Solution(mine, _borrowed, lambda value: isinstance(value, _FUNCTIONS), Exception)
    _peer.operations["call"] = _called_back
    return _words(lambda: _peer.ask("load", source))


def _called_back(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(function, _FUNCTIONS):
        raise TypeError("only a function of the tests may be called")
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        _note_swallowed(error)  # unless it comes back as the answer to what the tests asked
        raise
    if isinstance(value, _LAZY):  # it cannot be sent, and the solution may swallow that
        _skipped.append(f"the solution did not run the {type(value).__name__} of the test")
        value.close()
    return value


def take_names(wanted: list[str], modules: dict[str, str]) -> str:
    """Give the tests the names they use: modules from here, the rest from the solution."""
    return _words(lambda: _take(wanted, modules))


def _take(wanted: list[str], modules: dict[str, str]) -> None:
    for name, module in modules.items():
        _space[name] = importlib.import_module(module)
    for name in wanted:
        kind, value = _peer.ask("name", name)
        if kind == "exception":
            _space[name] = exception_class(value)
        elif kind == "value":
            is_class = isinstance(value, Handle) and name[:1].isupper() and "_" not in name
            _space[name] = Class(value._number) if is_class else value


def run(source: str) -> str:
    """Run a piece of the tests; `passed`, or what went wrong."""
    _failed.clear()
    _skipped.clear()
    words = _words(lambda: exec(swallowed.compile_tests(source), _space))
    wrong = [*_failed, *_skipped, swallowed.unfinished(source)][0]
    return f"failed: {wrong}" if words == "passed" and wrong else words


def _words(step: Callable[[], Any]) -> str:
    """`passed`, `failed: …`; `broken: …` if the solution can no longer be asked, `fault: …` if the tests cannot run."""
    try:
        step()
    except KeyboardInterrupt:
        raise  # the time is over: the session says so
    except BaseException as error:
        ours = isinstance(error, ImportError) and not hasattr(error, "_of_solution")
        words = f"{'fault' if ours else 'failed'}: {_said(error)}"
    else:
        words = "passed"
    return f"broken: {_peer.broken}" if _peer.broken else words


def _said(error: BaseException) -> str:
    try:
        words = str(error)[:_MOST_WORDS]
    except BaseException:
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
