"""Plain data as JSON and back: the only values that cross between the tests and the solution.

A reader creates values of the types listed here only, whatever the other side sends. Mutable containers are numbered on
both sides in the order in which they occur, so the reply to a call can refer to a container of the request and send its
new items: a list that the solution sorts in place is sorted for the caller too.

Answers of remote environments (`resources.rpc.codec`) are another contract: copies of trees, limited in size, for a
host that must not create classes or cyclic values from hostile data.
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

_MAX_JSON_INT = 1 << 62
_ARRAY_KINDS = "biufcUS"
_NUMBER_LIBRARIES = ("numpy", "sympy", "mpmath", "gmpy2")

_EMPTY: dict[Any, Any] = {}

# type: (value → its parts, parts → value)
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
_IMMUTABLE: dict[type, tuple[Callable[[Any], list[Any]], Callable[[list[Any]], Any]]] = {
    tuple: (list, tuple),
    frozenset: (list, frozenset),
    slice: (lambda v: [v.start, v.stop, v.step], lambda members: slice(*members)),
    type(_EMPTY.keys()): (list, lambda members: dict.fromkeys(members).keys()),
    type(_EMPTY.values()): (list, lambda members: dict(enumerate(members)).values()),
    type(_EMPTY.items()): (list, lambda members: dict(members).items()),
}
_MUTABLE: dict[type, Callable[[Any, list[Any]], None]] = {
    list: lambda old, members: old.extend(members),
    dict: lambda old, members: old.update(members),
    set: lambda old, members: old.update(members),
    bytearray: lambda old, members: old.extend(members),
    collections.deque: lambda old, members: old.extend(members),
    collections.OrderedDict: lambda old, members: old.update(members),
    collections.Counter: lambda old, members: old.update(dict(members)),
}
_TYPES: tuple[type, ...] = (bool, int, float, str, bytes, type(None), object, *_SCALARS, *_IMMUTABLE, *_MUTABLE)
_BY_NAME = {cls.__name__: cls for cls in _TYPES}


class DecodeError(Exception):
    """The other side sent something that is not plain data."""


def plain_value(value: Any) -> tuple[Any, ...]:
    """Return the plain value of an object whose class derives from a plain type, as a tuple of one; otherwise ()."""
    scalar: Any
    for scalar in (int, float, complex, str, bytes):
        if isinstance(value, scalar):
            return (scalar.__add__(value, scalar()),)
    container: Any
    for container in (*_MUTABLE, tuple, frozenset):
        if isinstance(value, container):
            return (container(list(dict.items(value) if isinstance(value, dict) else container.__iter__(value))),)
    return ()


class Writer:
    """Encodes the values of one message."""

    def __init__(self, export: Callable[[Any], Any], containers: list[Any] | None = None) -> None:
        """`export` encodes an object that is not plain, or raises; `containers` are those the other side knows."""
        self._export = export
        self.containers = list(containers or ())
        self._numbers = {id(container): number for number, container in enumerate(self.containers)}

    def write(self, value: Any) -> Any:
        """Encode one value."""
        cls = type(value)
        if value is None or cls in (bool, float, str):
            return value
        if cls is int:
            return value if -_MAX_JSON_INT < value < _MAX_JSON_INT else {"int": hex(value)}
        if cls in _MUTABLE or cls is collections.defaultdict:
            if id(value) in self._numbers:
                return {"met": self._numbers[id(value)]}
            self._numbers[id(value)] = len(self.containers)
            self.containers.append(value)
            name = cls.__name__ if cls in _MUTABLE else "dict"  # a default factory is not sent
            return {name: self.write_items(value)}
        if cls in _SCALARS:
            return {cls.__name__: [self.write(scalar) for scalar in _SCALARS[cls][0](value)]}
        if cls in _IMMUTABLE:
            return {cls.__name__: [self.write(member) for member in _IMMUTABLE[cls][0](value)]}
        return self._write_rare(value, cls)

    def write_items(self, container: Any) -> list[Any]:
        """Encode the items of a mutable container."""
        return [self.write(member) for member in (container.items() if isinstance(container, dict) else container)]

    def _write_rare(self, value: Any, cls: type) -> Any:
        if isinstance(value, type) and value in _TYPES:
            return {"type": value.__name__}
        if isinstance(value, BaseException):
            arguments = [self._write_or_str(argument) for argument in value.args]
            attributes = {name: self._write_or_str(vars(value)[name]) for name in _public_names(value)}
            return {"error": [class_names(cls), arguments, attributes]}
        if cls.__bases__ == (tuple,) and _public_names(cls) == set(getattr(cls, "_fields", ())):
            return {"named": [cls.__name__, list(value._fields), [self.write(member) for member in tuple(value)]]}

        # Numbers and arrays of libraries arrive as Python's numbers and as arrays.
        library = cls.__module__.partition(".")[0]
        if library == "numpy" and hasattr(value, "dtype"):
            if not hasattr(value, "shape") or value.shape == ():
                return self.write(value.item())
            if value.dtype.kind in _ARRAY_KINDS:
                return {"array": [value.dtype.str, list(value.shape), self.write(value.ravel().tolist())]}
        if library in _NUMBER_LIBRARIES and isinstance(value, numbers.Number):
            if isinstance(value, numbers.Integral):
                return self.write(int(value))
            if isinstance(value, numbers.Rational):
                return self.write(fractions.Fraction(int(value.numerator), int(value.denominator)))
            return self.write(float(value) if isinstance(value, numbers.Real) else complex(value))  # type: ignore[call-overload]
        if library == "sympy" and cls.__name__ in ("BooleanTrue", "BooleanFalse"):
            return bool(value)
        return self._export(value)

    def _write_or_str(self, value: Any) -> Any:
        try:
            return self.write(value)
        except Exception:
            return str(value)


def _public_names(value: Any) -> set[str]:
    return {name for name in vars(value) if not name.startswith("_")}


class Reader:
    """Decodes the values of one message."""

    def __init__(self, import_: Callable[[str, Any], Any], containers: list[Any] | None = None) -> None:
        """`import_` decodes a reference to an object of the other side; `containers` are those both sides know."""
        self._import = import_
        self.containers = list(containers or ())

    def read(self, data: Any) -> Any:
        """Decode one value."""
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        if not isinstance(data, dict) or len(data) != 1:
            raise DecodeError(f"{data!r:.60}")
        ((name, content),) = data.items()
        if name == "int":
            return int(content, 16)
        if name == "met":
            return self.containers[content if content >= 0 else len(self.containers)]
        if name == "type":
            return _BY_NAME[content]
        cls = _BY_NAME.get(name)
        if cls in _MUTABLE:
            container = cls()
            self.containers.append(container)  # before its items are read: it may contain itself
            self.fill(container, content)
            return container
        if cls in _SCALARS:
            if any(isinstance(member, list) for member in content):
                raise DecodeError(name)
            return _SCALARS[cls][1](*(_require_scalar(self.read(scalar)) for scalar in content))
        if cls in _IMMUTABLE:
            return _IMMUTABLE[cls][1]([self.read(member) for member in content])
        if name == "named":
            return self._read_named_tuple(*content)
        if name == "array":
            return self._read_array(*content)
        if name == "error":
            return self._read_error(*content)
        return self._import(name, content)

    def fill(self, container: Any, content: list[Any]) -> None:
        """Replace the items of a container, unless they are the same: the caller may be iterating over it."""
        members = [self.read(member) for member in content]
        is_same = len(container) == len(members)
        if isinstance(container, set):
            is_same = is_same and container == set(members)
        else:
            items = container.items() if isinstance(container, dict) else container
            is_same = is_same and all(map(_is_equal, list(items), members))
        if not is_same:
            container.clear()
            _MUTABLE.get(type(container), _MUTABLE[dict])(container, members)

    def _read_named_tuple(self, name: str, fields: list[str], content: list[Any]) -> Any:
        if not all(identifier.isidentifier() and not keyword.iskeyword(identifier) for identifier in (name, *fields)):
            raise DecodeError(name)
        return collections.namedtuple(name, fields)(*(self.read(member) for member in content))

    def _read_array(self, dtype: str, shape: list[int], content: Any) -> Any:
        import numpy  # not above: a sandbox without numpy gets no arrays

        if numpy.dtype(dtype).kind not in _ARRAY_KINDS:
            raise DecodeError(dtype)
        return numpy.array([_require_scalar(scalar) for scalar in self.read(content)], dtype=dtype).reshape(shape)

    def _read_error(self, bases: list[list[str]], arguments: list[Any], attributes: dict[str, Any]) -> BaseException:
        cls = exception_class(bases)
        args = [self.read(argument) for argument in arguments]
        try:
            error = cls(*args)
        except Exception:  # its constructor has other parameters
            error = cls.__new__(cls)
            error.args = tuple(args)
        for name, attribute in attributes.items():
            if name.isidentifier() and not name.startswith("_"):
                setattr(error, name, self.read(attribute))
        vars(error)["_of_solution"] = True
        return error


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return one is other or (type(one) in (bool, int, float, str, bytes) and bool(one == other))


def _require_scalar(value: Any) -> Any:
    if value is not None and type(value) not in (bool, int, float, complex, str, bytes):
        raise DecodeError(f"{type(value).__name__} in a scalar")
    return value


_NOT_SHARED = frozenset(("solution", "__main__", "unittest", "pytest", "_pytest", __name__.partition(".")[0]))
"""Modules whose exception classes are not looked up: test runners take those of unittest and pytest for verdicts."""
_own_exceptions: dict[str, type[BaseException]] = {}


def class_names(cls: type) -> list[list[str]]:
    """Return module and name of a class and of its bases, in method resolution order, without `object`."""
    return [[base.__module__, base.__qualname__] for base in cls.__mro__[:-1]]


def exception_class(bases: list[list[str]]) -> type[BaseException]:
    """Return the exception class of these names. One that is not known here is created below its nearest known base."""
    if not bases:
        return Exception
    module, name = bases[0]
    cls = None if module.partition(".")[0] in _NOT_SHARED else getattr(sys.modules.get(module), name, None)
    is_exception = isinstance(cls, type) and issubclass(cls, BaseException)
    if is_exception and cls.__module__.partition(".")[0] not in _NOT_SHARED:
        return cls  # type: ignore[return-value]
    if name not in _own_exceptions:
        _own_exceptions[name] = type(name, (exception_class(bases[1:]),), {})
    return _own_exceptions[name]
