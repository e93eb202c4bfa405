"""Plain data as bytes, and back. Reading runs nothing that is read, and refuses what is not of the form.

The form is JSON. What JSON has no word for is an object with one key that begins with `!`: `{"!bytes": "aGk="}`.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from dataclasses import fields
from typing import Any

from agentfly.types import Image, Message, Task, ToolCall

LIMIT = 32 << 20
"""Most bytes of one answer."""
MOST_KEYS = 10_000
"""Most members of sets, and of dicts with other keys than text, in one answer: such keys can be made to collide."""
_RECORDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Image, Message, Task, ToolCall)}
_LISTED: dict[type[Any], str] = {tuple: "!tuple", set: "!set", frozenset: "!frozenset"}
_AS_IS = frozenset({type(None), bool, float})
_EACH = 4
"""Bytes that a member takes at least, to be spent before the members are looked at."""
_NUMBERS = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
"""Arrays of these hold numbers, and numbers only."""


class NotPlain(Exception):
    """A value cannot be carried. It says what it is: `a Foo`, `a list with a Foo in it`."""


class TooBig(NotPlain):
    """A value takes more than it may."""


class Malformed(Exception):
    """What came is not of the form."""


def write(value: Any, limit: int = LIMIT, pictures: bool = True) -> str:
    """The value as JSON; NotPlain where it cannot be carried, or takes more than about `limit` bytes.

    `pictures`: whether Pillow's pictures are made into Images, which takes its time.
    """
    try:
        text = json.dumps(_Writer(limit, pictures).form(value), ensure_ascii=False, separators=(",", ":"))
    except _Unsendable as error:
        whole, part = f"a {type(value).__name__}", f"a {error}"
        raise NotPlain(whole if whole == part else f"{whole} with {part} in it") from None
    except RecursionError:
        raise NotPlain(f"a {type(value).__name__} that holds itself, or is nested too deep") from None
    if len(text) > limit or (not text.isascii() and len(text.encode("utf-8", "surrogatepass")) > limit):
        raise TooBig(_over(limit))
    return text


def read(data: bytes) -> Any:
    """The value that was written; Malformed where it is none."""
    if len(data) > LIMIT + (1 << 20):
        raise Malformed(f"{len(data)} bytes, where {LIMIT} are allowed")
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"), object_hook=_Reader().take)
    except RecursionError:
        raise Malformed("it is nested too deep") from None
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None


def _over(limit: int) -> str:
    return f"more than {limit >> 10} KB"


class _Unsendable(Exception):
    """A part of a value, of the type it names, cannot be carried."""


class _Writer:
    def __init__(self, limit: int, pictures: bool) -> None:
        self._limit = self._left = limit
        self._pictures = pictures
        self._keys = MOST_KEYS

    def form(self, value: Any) -> Any:
        """The value in words of JSON. Its own few bytes are spent by what holds it."""
        kind = type(value)
        if kind in _AS_IS:
            return value
        if isinstance(value, str):
            self._spend(len(value))
            return value
        if isinstance(value, int):
            return value if value.bit_length() < 4096 else {"!int": hex(value)}
        if isinstance(value, float):
            return value
        if isinstance(value, dict):
            return self._dict(value)
        if kind is list or kind in _LISTED:
            self._spend(_EACH * len(value))
            inner = [self.form(each) for each in value]
            return inner if kind is list else {_LISTED[kind]: self._keyed(inner, kind)}
        if kind is _RECORDS.get(kind.__name__):
            return {f"!{kind.__name__}": [self.form(getattr(value, each.name)) for each in fields(value)]}
        return self._other(value)

    def _dict(self, value: dict[Any, Any]) -> Any:
        self._spend(2 * _EACH * len(value))
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            self._spend(sum(map(len, value)))
            return {key: self.form(each) for key, each in value.items()}
        return {"!dict": self._keyed([[self.form(key), self.form(each)] for key, each in value.items()], dict)}

    def _keyed(self, members: list[Any], kind: type) -> list[Any]:
        self._keys -= 0 if kind is tuple else len(members)
        if self._keys < 0:
            raise TooBig(f"more than {MOST_KEYS} members of sets or keys that are no text")
        return members

    def _other(self, value: Any) -> Any:
        home = type(value).__module__.partition(".")[0]
        if isinstance(value, bytes | bytearray):
            return {"!bytes": self._encoded(value)}
        if home == "PIL" and hasattr(value, "save") and self._pictures:
            return self.form(Image.of(value))
        if home == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
            array = numpy.asarray(value)
            if _NUMBERS.fullmatch(array.dtype.str):
                return {"!array": [array.dtype.str, list(array.shape), self._encoded(numpy.ascontiguousarray(array))]}
        raise _Unsendable(type(value).__name__)

    def _encoded(self, data: Any) -> str:
        self._spend(memoryview(data).nbytes * 4 // 3)
        return base64.b64encode(data).decode()

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooBig(_over(self._limit))


class _Reader:
    def __init__(self) -> None:
        self._keys = MOST_KEYS

    def take(self, found: dict[str, Any]) -> Any:
        """An object of JSON, as what it stands for. What is in it has been taken already."""
        tag = next(iter(found), "")
        if not tag.startswith("!"):
            return found
        content = found[tag]
        if len(found) > 1:
            raise ValueError("a tag among other keys")
        if tag == "!int":
            return int(content, 16)
        if tag == "!bytes":
            return base64.b64decode(content, validate=True)
        if not isinstance(content, list):
            raise TypeError(f"a {type(content).__name__} where a list should be")
        return self._listed(tag[1:], content)

    def _listed(self, name: str, content: list[Any]) -> Any:
        if name in ("dict", "set", "frozenset"):
            self._keys -= len(content)
            if self._keys < 0:
                raise ValueError("more keys than allowed")
            return {"dict": dict, "set": set, "frozenset": frozenset}[name](content)
        if name == "tuple":
            return tuple(content)
        return _array(*content) if name == "array" else _record(_RECORDS[name], content)


def _array(kind: str, shape: list[int], data: str) -> Any:
    import numpy  # only who is sent arrays needs it

    if not _NUMBERS.fullmatch(kind):
        raise ValueError("an array of what are no numbers")
    return numpy.frombuffer(base64.b64decode(data, validate=True), kind).reshape(shape).copy()[()]


def _record(kind: type[Any], content: list[Any]) -> Any:
    if len(content) != len(fields(kind)) or (kind is Image and not isinstance(content[0], str)):
        raise ValueError(f"no {kind.__name__}")
    return kind(*content)
