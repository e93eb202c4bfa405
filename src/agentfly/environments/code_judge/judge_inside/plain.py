"""Plain data as JSON and back: all that ever crosses between the tests and the solution.

What is read is of the types listed here, whatever the other side claims. Containers that can change are numbered in the
order in which they are met, on both sides alike: so the answer to a call can say "your second list" and what became of
each of them, and a list that was sorted in place is sorted for the caller too.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import keyword
import numbers
import sys
from collections.abc import Callable
from typing import Any

_LARGE = 1 << 62
_ARRAY_KINDS = "biufcUS"
_LIBRARY_NUMBERS = ("numpy", "sympy", "mpmath", "gmpy2")

_NOTHING: dict[Any, Any] = {}

# type: (its parts, the thing of its parts)
_SCALARS: dict[type, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    bytes: (lambda v: [v.hex()], bytes.fromhex),
    complex: (lambda v: [v.real, v.imag], complex),
    range: (lambda v: [v.start, v.stop, v.step], range),
    fractions.Fraction: (lambda v: [v.numerator, v.denominator], fractions.Fraction),
    decimal.Decimal: (lambda v: [str(v)], decimal.Decimal),
    datetime.date: (lambda v: [v.isoformat()], datetime.date.fromisoformat),
    datetime.time: (lambda v: [v.isoformat()], datetime.time.fromisoformat),
    datetime.datetime: (lambda v: [v.isoformat()], datetime.datetime.fromisoformat),
    datetime.timedelta: (lambda v: [v.days, v.seconds, v.microseconds], datetime.timedelta),
}
_FIXED: dict[type, tuple[Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    tuple: (list, tuple),
    frozenset: (list, frozenset),
    slice: (lambda v: [v.start, v.stop, v.step], lambda parts: slice(*parts)),
    type(_NOTHING.keys()): (list, lambda parts: dict.fromkeys(parts).keys()),
    type(_NOTHING.values()): (list, lambda parts: dict(enumerate(parts)).values()),
    type(_NOTHING.items()): (list, lambda parts: dict(parts).items()),
}
_CHANGING: dict[type, Callable[[Any, list[Any]], None]] = {
    list: lambda old, parts: old.extend(parts),
    dict: lambda old, parts: old.update(parts),
    set: lambda old, parts: old.update(parts),
    bytearray: lambda old, parts: old.extend(parts),
    collections.deque: lambda old, parts: old.extend(parts),
    collections.OrderedDict: lambda old, parts: old.update(parts),
    collections.Counter: lambda old, parts: old.update(dict(parts)),
}
_TYPES: tuple[type, ...] = (bool, int, float, str, bytes, type(None), object, *_SCALARS, *_FIXED, *_CHANGING)
_BY_NAME = {kind.__name__: kind for kind in _TYPES}


class Unreadable(Exception):
    """The other side sent what is no plain data."""


def plain_value(value: Any) -> tuple[Any, ...]:
    """The plain value that an object of a derived class is made on, alone in a tuple; an empty one if there is none."""
    scalar: Any
    for scalar in (int, float, complex, str, bytes):
        if isinstance(value, scalar):
            return (scalar.__add__(value, scalar()),)
    container: Any
    for container in (*_CHANGING, tuple, frozenset):
        if isinstance(value, container):
            return (container(list(dict.items(value) if isinstance(value, dict) else container.__iter__(value))),)
    return ()


class Writer:
    """Values of one message, as JSON."""

    def __init__(self, lend: Callable[[Any], Any], met: list[Any] | None = None) -> None:
        """`lend` writes what is not plain, or raises; `met` are the containers that the other side knows already."""
        self._lend = lend
        self.met = list(met or ())
        self._numbers = {id(each): number for number, each in enumerate(self.met)}

    def write(self, value: Any) -> Any:
        """One value."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if -_LARGE < value < _LARGE else {"int": hex(value)}
        if kind in _CHANGING or kind is collections.defaultdict:
            if id(value) in self._numbers:
                return {"met": self._numbers[id(value)]}
            self._numbers[id(value)] = len(self.met)
            self.met.append(value)
            name = kind.__name__ if kind in _CHANGING else "dict"  # a default factory stays where it is
            return {name: self.parts(value)}
        if kind in _SCALARS:
            return {kind.__name__: [self.write(each) for each in _SCALARS[kind][0](value)]}
        if kind in _FIXED:
            return {kind.__name__: [self.write(each) for each in _FIXED[kind][0](value)]}
        return self._write_rare(value, kind)

    def parts(self, container: Any) -> list[Any]:
        """What a container that can change holds."""
        return [self.write(each) for each in (container.items() if isinstance(container, dict) else container)]

    def _write_rare(self, value: Any, kind: type) -> Any:
        if isinstance(value, type) and value in _TYPES:
            return {"type": value.__name__}
        if isinstance(value, BaseException):
            return {"error": self._error(value)}
        if kind.__bases__ == (tuple,) and _public(kind) == set(getattr(kind, "_fields", ())):
            return {"named": [kind.__name__, list(value._fields), [self.write(each) for each in tuple(value)]]}
        library = kind.__module__.partition(".")[0]
        if library == "numpy" and hasattr(value, "dtype"):
            if not hasattr(value, "shape") or value.shape == ():
                return self.write(value.item())
            if value.dtype.kind in _ARRAY_KINDS:
                return {"array": [value.dtype.str, list(value.shape), self.write(value.ravel().tolist())]}
        if library in _LIBRARY_NUMBERS and isinstance(value, numbers.Number):
            return self.write(_builtin_number(value))
        if library == "sympy" and kind.__name__ in ("BooleanTrue", "BooleanFalse"):
            return bool(value)
        return self._lend(value)

    def _error(self, error: BaseException) -> list[Any]:
        kinds = class_names(type(error))
        said = [self._told(each) for each in error.args]
        own = {name: self._told(each) for name, each in vars(error).items() if not name.startswith("_")}
        return [kinds, said, own]

    def _told(self, value: Any) -> Any:
        try:
            return self.write(value)
        except Exception:
            return str(value)


def _public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def _builtin_number(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Rational):
        return fractions.Fraction(int(value.numerator), int(value.denominator))
    return float(value) if isinstance(value, numbers.Real) else complex(value)


class Reader:
    """Values of one message, from JSON."""

    def __init__(self, borrow: Callable[[str, Any], Any], met: list[Any] | None = None) -> None:
        """`borrow` makes something of what the other side lent; `met` are the containers that both sides know."""
        self._borrow = borrow
        self.met = list(met or ())

    def read(self, said: Any) -> Any:
        """One value."""
        if said is None or isinstance(said, (bool, int, float, str)):
            return said
        if not isinstance(said, dict) or len(said) != 1:
            raise Unreadable(f"{said!r:.60}")
        ((name, content),) = said.items()
        if name == "int":
            return int(content, 16)
        if name == "met":
            return self.met[content if content >= 0 else len(self.met)]
        if name == "type":
            return _BY_NAME[content]
        kind = _BY_NAME.get(name)
        if kind in _CHANGING:
            made = kind()
            self.met.append(made)  # before what it holds is read: it may hold itself
            self.fill(made, content)
            return made
        if kind in _SCALARS:
            if any(isinstance(each, list) for each in content):
                raise Unreadable(name)
            return _SCALARS[kind][1](*(_scalar(self.read(each)) for each in content))
        if kind in _FIXED:
            return _FIXED[kind][1]([self.read(each) for each in content])
        if name in ("error", "named", "array"):
            return getattr(self, f"_{name}")(*content)
        return self._borrow(name, content)

    def fill(self, container: Any, content: list[Any]) -> None:
        """Make a container hold what was sent."""
        parts = [self.read(each) for each in content]
        if _is_same(container, parts):
            return  # somebody may be going through it
        container.clear()
        _CHANGING.get(type(container), _CHANGING[dict])(container, parts)

    def _named(self, name: str, fields: list[str], content: list[Any]) -> Any:
        if not all(each.isidentifier() and not keyword.iskeyword(each) for each in (name, *fields)):
            raise Unreadable(name)
        return collections.namedtuple(name, fields)(*(self.read(each) for each in content))

    def _array(self, dtype: str, shape: list[int], content: Any) -> Any:
        import numpy  # here, not above: a sandbox may have none, and then no array comes

        if numpy.dtype(dtype).kind not in _ARRAY_KINDS:
            raise Unreadable(dtype)
        return numpy.array([_scalar(each) for each in self.read(content)], dtype=dtype).reshape(shape)

    def _error(self, kinds: list[list[str]], said: list[Any], own: dict[str, Any]) -> BaseException:
        kind = exception_class(kinds)
        arguments = [self.read(each) for each in said]
        try:
            error = kind(*arguments)
        except Exception:  # its constructor wants something else
            error = kind.__new__(kind)
            error.args = tuple(arguments)
        for name, each in own.items():
            if name.isidentifier() and not name.startswith("_"):
                setattr(error, name, self.read(each))
        vars(error)["_of_solution"] = True
        return error


def _is_same(container: Any, parts: list[Any]) -> bool:
    if isinstance(container, (set, dict)) and len(container) != len(parts):
        return False
    if isinstance(container, set):
        return container == set(parts)
    held = list(container.items() if isinstance(container, dict) else container)
    return len(held) == len(parts) and all(map(_is_equal, held, parts))


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return one is other or (type(one) in (bool, int, float, str, bytes) and bool(one == other))


def _scalar(value: Any) -> Any:
    if value is not None and type(value) not in (bool, int, float, complex, str, bytes):
        raise Unreadable(f"{type(value).__name__} in a scalar")
    return value


_NOT_SHARED = frozenset(("solution", "__main__", "unittest", "pytest", "_pytest", __name__.partition(".")[0]))
"""Modules whose exceptions stay on their own side: a test runner takes those of unittest and pytest as verdicts."""
_own_exceptions: dict[str, type[BaseException]] = {}


def class_names(kind: type) -> list[list[str]]:
    """A class and those it derives from, the nearest first, each by its module and name."""
    return [[each.__module__, each.__qualname__] for each in kind.__mro__[:-1]]


def exception_class(kinds: list[list[str]]) -> type[BaseException]:
    """The exception class of these names; one that only the other side has is made, below the nearest that is here."""
    if not kinds:
        return Exception
    module, name = kinds[0]
    here = None if module.partition(".")[0] in _NOT_SHARED else getattr(sys.modules.get(module), name, None)
    if (
        isinstance(here, type)
        and issubclass(here, BaseException)
        and here.__module__.partition(".")[0] not in _NOT_SHARED
    ):
        return here
    if name not in _own_exceptions:
        _own_exceptions[name] = type(name, (exception_class(kinds[1:]),), {})
    return _own_exceptions[name]
