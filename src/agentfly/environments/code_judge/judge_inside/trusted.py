"""The tests' process: the solution's names as handles, and the tests run one by one.

The solution decides what its own objects do. It never decides whether one of them equals plain data, and it never sees
what the tests compare a result with: an operation that would show it is computed here, on the object's plain value.
Only an object that the tests themselves created from a class of the solution performs such an operation itself.
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

from . import checks
from .peer import Peer, RemoteObject, serve_solution
from .plain import exception_class

_SET_DUMPABLE, _GET_DUMPABLE = 4, 3
_MAX_CHARACTERS = 500
_COMPARING_METHODS = (
    "startswith endswith issubset issuperset isdisjoint difference symmetric_difference intersection union "
    "count index find rfind rindex"
)
"""Methods of plain data that a test passes the expected value to."""
_DUNDER_ATTRIBUTES = frozenset(("__name__", "__qualname__", "__dict__", "__annotations__"))
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    functools.partial,
)
_LAZY = (types.CoroutineType, types.GeneratorType)
_SILENT_EXCEPTIONS = frozenset(("StopIteration", "StopAsyncIteration", "CancelledError"))
"""Exceptions that end an iterator or a task silently: with StopIteration `all(map(f, cases))` would hold. RuntimeError
replaces them, as in generators (PEP 479), unless the tests name them."""
_globals: dict[str, Any] = {"__name__": "tests", checks.END: checks.report_end}
_failed: list[str] = []
"""Failed assertions of the current step that the solution checks."""
_skipped: list[str] = []
"""Checks of the current step that the solution kept from being reached."""
_handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
_peer: Peer


class Handle(RemoteObject):
    """An object of the solution."""

    __slots__ = ("__weakref__", "_fixed", "_made_by_tests", "_number")

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_fixed", ())
        object.__setattr__(self, "_made_by_tests", False)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        kind, value = _peer.ask("call", self, *args, **kwargs)
        if kind == "coroutine":
            return _run_coroutine(value)
        if isinstance(value, Handle) and isinstance(self, Class):
            object.__setattr__(value, "_made_by_tests", True)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _DUNDER_ATTRIBUTES:
            raise AttributeError(name)
        if name in _COMPARING_METHODS.split() and not self._made_by_tests:
            return getattr(_require_plain(self), name)
        return _peer.ask("getattr", self, name)

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Handle):
            return _peer.ask("eq", self, other)
        plain = _get_plain(self)
        return bool(plain) and plain[0] == other

    def __ne__(self, other: object) -> Any:
        return _peer.ask("ne", self, other) if isinstance(other, Handle) else not self == other

    def __contains__(self, item: object) -> bool:
        if self._made_by_tests:
            return bool(_peer.ask("contains", self, item))
        return any(member is item or member == item for member in self)  # type: ignore[attr-defined]

    def __enter__(self) -> Any:
        made_by_tests = self._made_by_tests
        value = _peer.ask("enter", self)
        if value is self:
            object.__setattr__(self, "_made_by_tests", made_by_tests)
        return value

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        try:
            swallows = bool(_peer.ask("leave", self, error))
        except BaseException as other:
            if error is not None and checks.is_failed_check(error):
                if isinstance(other, AssertionError):
                    _mark_as_own(other)
                else:
                    _record_loss(error)
            raise
        if swallows and error is not None:
            _record_loss(error)
        return swallows

    def __instancecheck__(self, instance: object) -> bool:
        return bool(_peer.ask("isinstance", instance, self))

    def __subclasscheck__(self, cls: object) -> bool:
        return bool(_peer.ask("issubclass", cls, self))

    def __deepcopy__(self, memo: object) -> Any:
        return _peer.ask("deepcopy", self)


class Class(Handle):
    """A name of the solution that the tests write as a class: with a capital, and no underscore."""

    __slots__ = ()


def _unary(name: str) -> Callable[..., Any]:
    """An operation that shows the solution nothing of what the tests expect."""
    return lambda self, *operands: _peer.ask(name, self, *operands)


def _binary(name: str, reflected: bool) -> Callable[[Any, Any], Any]:
    """An operation with another value, which may be what the tests expect."""
    local = getattr(operator, name)

    def operate(self: Any, other: Any) -> Any:
        made_by_tests = self._made_by_tests
        if not made_by_tests and not isinstance(other, Handle):
            plain = _require_plain(self)
            return local(other, plain) if reflected else local(plain, other)
        value = _peer.ask(name, *((other, self) if reflected else (self, other)))
        if isinstance(value, Handle):
            object.__setattr__(value, "_made_by_tests", made_by_tests)
        return value

    return operate


_UNARY = (
    "len iter next bool str repr hash setattr delattr int float complex round reversed format dir neg pos abs invert "
    "index getitem setitem delitem trunc floor ceil copy"
)
_COMPARISONS = "lt le gt ge"
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _name in _UNARY.split():
    setattr(Handle, f"__{_name}__", _unary(_name))
for _name in _COMPARISONS.split():
    setattr(Handle, f"__{_name}__", _binary(_name, False))
for _name in _ARITHMETIC.split():
    setattr(Handle, f"__{_name.strip('_')}__", _binary(_name, False))
    setattr(Handle, f"__r{_name.strip('_')}__", _binary(_name, True))


def _get_plain(handle: Handle) -> Any:
    """Return the plain value of an object as a tuple of one; () if it has none.

    An immutable value is requested once: a solution that replies first 1e9 and then -1e9 would be between any bounds.
    """
    plain = handle._fixed or _peer.ask("plain", handle)
    if plain and isinstance(plain[0], (int, float, complex, str, bytes, tuple, frozenset)):
        object.__setattr__(handle, "_fixed", plain)
    return plain


def _require_plain(handle: Handle) -> Any:
    """Return the plain value of an object, fetched before the solution can know what it is compared with."""
    plain = _get_plain(handle)
    if not plain:
        raise TypeError("the solution returned an object of its own where the test expects plain data")
    return plain[0]


async def _run_coroutine(coroutine: Handle) -> Any:
    return _peer.ask("finish", coroutine)


class _SolutionPeer(Peer):
    """The connection to the solution's process. It notices when the solution swallows an exception of the tests."""

    def ask(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        failed, skipped = len(_failed), len(_skipped)
        try:
            return super().ask(operation, *args, **kwargs)
        except BaseException as error:
            del _skipped[skipped:]  # the test itself sees an exception
            if isinstance(error, AssertionError) and len(_failed) > failed:
                del _failed[failed:]
                _mark_as_own(error)
            silent = {cls.__name__ for cls in type(error).__mro__} & _SILENT_EXCEPTIONS
            if silent and operation != "next" and not any(map(checks.uses_name, silent)):
                raise RuntimeError(f"the solution raised {type(error).__name__}") from error
            raise


def _record_loss(error: BaseException) -> None:
    """Record what the test loses if the solution swallows this exception of the tests."""
    if checks.is_failed_check(error):
        _failed.append("the solution swallowed a failed assertion of the test")
    elif check := checks.find_skipped_check(error):
        _skipped.append(f"the solution swallowed {type(error).__name__}, so that this was not reached: {check}")


def _mark_as_own(error: AssertionError) -> None:
    """Treat an assertion that the solution passes on as one of the tests."""
    vars(error).pop("_of_solution", None)


def _call_back(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the tests for the solution."""
    if not isinstance(function, _FUNCTIONS):
        raise TypeError("only a function of the tests may be called")
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        _record_loss(error)  # removed if it returns as the exception of the tests' own request
        raise
    if isinstance(value, _LAZY):  # it cannot be sent, and the solution may swallow that error
        _skipped.append(f"the solution did not run the {type(value).__name__} of the test")
        value.close()
    return value


def _get_handle(number: int) -> Handle:
    """Return the handle of an object: always the same one, so that `is` holds.

    An object that the solution returns counts as the solution's, even if the tests created it.
    """
    handle = _handles.setdefault(number, Handle(number))
    object.__setattr__(handle, "_made_by_tests", False)
    return handle


def protect_process() -> None:
    """Deny other processes access to this one, and import nothing from folders that a solution can write to."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("this process cannot be protected from other processes")
    folder = os.path.realpath(os.getcwd())
    sys.path[:] = [entry for entry in sys.path if os.path.commonpath([folder, os.path.realpath(entry)]) != folder]


# The functions that CodeJudge calls. Each returns `passed`, `failed: …`, `broken: …` if the solution's process cannot
# reply any more, or `fault: …` if the tests themselves cannot run.


def start_solution(source: str) -> str:
    """Fork the solution's process and load the solution there."""
    global _peer
    trusted_end, other = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            trusted_end.close()
            serve_solution(other)
        finally:
            os._exit(0)
    other.close()
    _peer = _SolutionPeer(trusted_end, _get_handle, lambda value: isinstance(value, _FUNCTIONS), Exception)
    _peer.operations["call"] = _call_back
    return _report(lambda: _peer.ask("load", source))


def import_names(names: list[str], modules: dict[str, str]) -> str:
    """Define the globals of the tests: modules of this process, and names of the solution."""

    def import_all() -> None:
        for name, module in modules.items():
            _globals[name] = importlib.import_module(module)
        for name in names:
            kind, value = _peer.ask("name", name)
            if kind == "exception":
                _globals[name] = exception_class(value)
            elif kind == "value":
                is_class = isinstance(value, Handle) and name[:1].isupper() and "_" not in name
                _globals[name] = Class(value._number) if is_class else value

    return _report(import_all)


def run(source: str) -> str:
    """Run a step of the tests."""
    _failed.clear()
    _skipped.clear()
    result = _report(lambda: exec(checks.compile_tests(source), _globals))
    error = [*_failed, *_skipped, checks.find_incomplete_test(source)][0]
    return f"failed: {error}" if result == "passed" and error else result


def _report(step: Callable[[], Any]) -> str:
    try:
        step()
        result = "passed"
    except KeyboardInterrupt:
        raise  # the time limit of the session
    except BaseException as error:
        is_fault = isinstance(error, ImportError) and not hasattr(error, "_of_solution")
        try:
            text = str(error)[:_MAX_CHARACTERS]
        except BaseException:
            text = ""
        name = type(error).__name__
        result = f"{'fault' if is_fault else 'failed'}: {f'{name}: {text}' if text else name}"
    return f"broken: {_peer.broken}" if _peer.broken else result
