"""Plain data to bytes and back. Decoding never runs code from the data and rejects everything malformed.

The format is JSON. Types that JSON lacks are objects with a single key that begins with `!`: `{"!bytes": "aGk="}`.

Values are copied, as trees: the host decodes what a hostile process may have written, so sizes and keys are limited, a
value that contains itself is refused, and few types exist. The JSON parser decodes bottom-up. The code judge needs
another codec (`environments.code_judge.judge_inside.plain`): between its two processes, inside one sandbox, values keep
their identity and their cycles, which takes a top-down decoder (about seven times slower on nested lists), and
exceptions and named tuples are rebuilt as classes, which a host must not do for hostile data.
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
"""Maximum size of one answer in bytes."""
MAX_KEYS = 10_000
"""Maximum number of set members and non-string dict keys in one answer: such keys can be chosen to collide."""
_RECORDS: dict[str, type[Any]] = {cls.__name__: cls for cls in (Image, Message, Task, ToolCall)}
_COLLECTIONS: dict[type[Any], str] = {tuple: "!tuple", set: "!set", frozenset: "!frozenset"}
_AS_IS = frozenset({type(None), bool, float})
_ITEM_SIZE = 4
"""Minimum encoded size of an item, charged before the items are visited."""
_NUMERIC_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")
"""numpy dtypes that hold only numbers."""


class NotSerializable(Exception):
    """A value cannot be encoded. The message describes it: `a Foo`, `a list with a Foo in it`."""


class TooBig(NotSerializable):
    """A value exceeds the size limit."""


class Malformed(Exception):
    """The data is not valid."""


class _UnsupportedType(Exception):
    """Part of a value has this type."""


def write(value: Any, limit: int = LIMIT, images: bool = True) -> str:
    """Encode a value as JSON. Raises NotSerializable if it cannot be encoded in about `limit` bytes.

    images: whether to convert Pillow images to Image, which is slow.
    """
    try:
        text = json.dumps(_Encoder(limit, images).encode(value), ensure_ascii=False, separators=(",", ":"))
    except _UnsupportedType as error:
        whole, detail = f"a {type(value).__name__}", f"a {error}"
        raise NotSerializable(whole if whole == detail else f"{whole} with {detail} in it") from None
    except RecursionError:
        raise NotSerializable(f"a {type(value).__name__} that contains itself, or is nested too deep") from None
    if len(text) > limit or (not text.isascii() and len(text.encode("utf-8", "surrogatepass")) > limit):
        raise TooBig(f"more than {limit >> 10} KB")
    return text


def read(data: bytes) -> Any:
    """Decode a value; Malformed if the data is not valid."""
    if len(data) > LIMIT + (1 << 20):
        raise Malformed(f"{len(data)} bytes, where {LIMIT} are allowed")
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"), object_hook=_TagDecoder().decode)
    except RecursionError:
        raise Malformed("it is nested too deep") from None
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None


class _Encoder:
    """Converts one value to JSON types and stops as soon as it exceeds the limit."""

    def __init__(self, limit: int, images: bool) -> None:
        self._limit = self._left = limit
        self._images = images
        self._keys_left = MAX_KEYS

    def encode(self, value: Any) -> Any:
        """The value in JSON types. The size of an item itself is charged by the container."""
        cls = type(value)
        if cls in _AS_IS:
            return value
        if isinstance(value, str):
            self._charge(len(value))
            return value
        if isinstance(value, int):
            # The JSON parser refuses a number of more than 4,300 digits, and takes quadratic time for a long one.
            return value if value.bit_length() < 4096 else {"!int": hex(value)}
        if isinstance(value, float):
            return value
        if isinstance(value, dict):
            self._charge(2 * _ITEM_SIZE * len(value))
            # A key of the value that looks like a tag would be decoded as one: such a dict is sent as pairs.
            if all(isinstance(key, str) and not key.startswith("!") for key in value):
                self._charge(sum(map(len, value)))
                return {key: self.encode(member) for key, member in value.items()}
            pairs = [[self.encode(key), self.encode(member)] for key, member in value.items()]
            self._charge_keys(len(pairs))
            return {"!dict": pairs}
        if cls is list or cls in _COLLECTIONS:
            # Before the items are visited: a list of a billion references to one item is refused at once.
            self._charge(_ITEM_SIZE * len(value))
            items = [self.encode(member) for member in value]
            if cls is set or cls is frozenset:
                self._charge_keys(len(items))
            return items if cls is list else {_COLLECTIONS[cls]: items}
        if cls is _RECORDS.get(cls.__name__):
            return {f"!{cls.__name__}": [self.encode(getattr(value, field.name)) for field in fields(value)]}
        if isinstance(value, bytes | bytearray):
            return {"!bytes": self._encode_bytes(value)}
        package = cls.__module__.partition(".")[0]
        if package == "PIL" and hasattr(value, "save") and self._images:
            return self.encode(Image.of(value))
        if package == "numpy" and (numpy := sys.modules.get("numpy")) is not None:
            array = numpy.asarray(value)
            if _NUMERIC_DTYPE.fullmatch(array.dtype.str):
                data = self._encode_bytes(numpy.ascontiguousarray(array))
                return {"!array": [array.dtype.str, list(array.shape), data]}
        raise _UnsupportedType(cls.__name__)

    def _encode_bytes(self, data: Any) -> str:
        self._charge(memoryview(data).nbytes * 4 // 3)
        return base64.b64encode(data).decode()

    def _charge(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooBig(f"more than {self._limit >> 10} KB")

    def _charge_keys(self, count: int) -> None:
        self._keys_left -= count
        if self._keys_left < 0:
            raise TooBig(f"more than {MAX_KEYS} set members or keys that are not text")


class _TagDecoder:
    """Converts tagged JSON objects back. Called bottom-up: the contents of an object are already decoded."""

    def __init__(self) -> None:
        self._keys_left = MAX_KEYS

    def decode(self, encoded: dict[str, Any]) -> Any:
        """The value of one JSON object. Raises ValueError, TypeError or KeyError if it is malformed."""
        tag = next(iter(encoded), "")
        if not tag.startswith("!"):
            return encoded
        content = encoded[tag]
        # Keys after the tag would be dropped in silence.
        if len(encoded) > 1:
            raise ValueError("a tag among other keys")
        if tag == "!int":
            return int(content, 16)
        if tag == "!bytes":
            return base64.b64decode(content, validate=True)
        if not isinstance(content, list):
            raise TypeError(f"a {type(content).__name__} where a list should be")
        if tag in ("!dict", "!set", "!frozenset"):
            self._keys_left -= len(content)
            if self._keys_left < 0:
                raise ValueError("more keys than allowed")
            return {"!dict": dict, "!set": set, "!frozenset": frozenset}[tag](content)
        if tag == "!tuple":
            return tuple(content)
        if tag == "!array":
            import numpy  # only needed where arrays are received

            dtype, shape, data = content
            if not _NUMERIC_DTYPE.fullmatch(dtype):
                raise ValueError("an array of what are not numbers")
            # A copy, since the buffer is read-only; `[()]` makes a scalar of an array without dimensions.
            return numpy.frombuffer(base64.b64decode(data, validate=True), dtype).reshape(shape).copy()[()]
        cls = _RECORDS[tag[1:]]
        if len(content) != len(fields(cls)) or (cls is Image and not isinstance(content[0], str)):
            raise ValueError(f"no {cls.__name__}")
        return cls(*content)
