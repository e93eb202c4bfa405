"""Parsing of one tool call: its JSON, its name and its arguments, with a description of every error.

Malformed calls are not repaired, so that a model is trained on the exact format. The only exception is a raw newline
or tab inside a JSON string, which is unambiguous. Values that a trajectory file cannot store (NaN, half a surrogate
pair, nesting deeper than `MAX_DEPTH`) are errors here, so that no later stage has to handle them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentfly.types import ToolCall

MAX_DEPTH = 100
"""Nesting limit of lists and objects; far below the recursion limit of `json.dumps`."""

_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[\w.:/-]{1,128}")
_NAME_IN_JSON = re.compile(r'[\s\[]*\{\s*"(?:tool_)?name"\s*:\s*"([^"\\]+)"')


def _reject_constant(constant: str) -> float:
    raise ValueError(f"JSON has no {constant}")


def _parse_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits:.40} is too large")
    return number


_DECODER = json.JSONDecoder(strict=False, parse_constant=_reject_constant, parse_float=_parse_float)


def parse_json(text: str, at: int = 0) -> tuple[object, int, str]:
    """Parse the JSON value at `at`. Return the value, the index of its end, and the error ("" if valid)."""
    if space := _SPACE.match(text, at):
        at = space.end()
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        location = f"near {text[error.pos : error.pos + 16]!r}" if error.pos < len(text) else "at the end"
        reason = error.msg.removesuffix(" at")  # "Unterminated string starting at"
        return None, at, f"{reason} at character {error.pos}, {location}"
    except ValueError as error:
        return None, at, str(error)
    except RecursionError:
        return None, at, f"it is nested more than {MAX_DEPTH} deep"
    source = text[at:end]
    if "\\u" in source or source.count("[") + source.count("{") > MAX_DEPTH:
        return value, end, find_storage_error(value)
    return value, end, ""


def find_storage_error(value: object) -> str:
    """Return why `value` cannot be stored in a trajectory file; "" if it can."""
    level = [value]
    depth = -1
    while level:
        parents = [parent for parent in level if isinstance(parent, dict | list)]
        level = [child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)]
        depth += 1
    if depth > MAX_DEPTH:
        return f"it is nested more than {MAX_DEPTH} deep"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair (a \\ud… escape without its second half)"
    except ValueError as error:  # an integer with more digits than Python converts to text
        return str(error)
    return ""


def json_type(value: object) -> str:
    """The JSON type of a value, with its article."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return words.get(type(value), "a number")


def add_problem(call: ToolCall, problem: str) -> ToolCall:
    """Return the call with one more problem."""
    return replace(call, problem=f"{call.problem}; {problem}" if call.problem else problem)


def parse_name(text: str) -> tuple[str, str]:
    """Parse a function name written as plain text. Return the name and the error ("" if valid)."""
    name = text.strip()
    if _NAME.fullmatch(name):
        return name, ""
    return "", f"it has no readable name (found {name[:40]!r})" if name else "it has no name"


def parse_named_call(name: str, arguments: str, id: str = "") -> ToolCall:
    """Build a call from a name and the JSON text of its arguments, for formats that write the two separately."""
    name, problem = parse_name(name)
    value, end, error = parse_json(arguments)
    if error:
        return add_problem(ToolCall(name, {}, id, problem), f"its arguments are not JSON: {error}")
    call = _build_call(name, value, id, problem)
    surplus = arguments[end:].strip()
    return add_problem(call, f"there is more after its arguments: {surplus[:40]!r}") if surplus else call


def _build_call(name: str, arguments: object, id: str, problem: str) -> ToolCall:
    if isinstance(arguments, dict):
        return ToolCall(name, arguments, id, problem)
    error = f"its arguments are {json_type(arguments)}, not a JSON object"
    return add_problem(ToolCall(name, {}, id, problem), error)


def parse_tagged_call(name: str, inside: str, opening: re.Pattern[str], closing: str, text: str = "") -> ToolCall:
    """Build a call from a name and arguments written as text between tags.

    `opening` matches up to the value and captures the argument's name. These formats have no escapes: a value ends at
    the first `closing`. Values stay text even if they are valid JSON: the tool's schema decides their type (see
    `agentfly.tooling.schema`). With `text`, `opening` also captures the declared type of the value: a value of the type
    `text` is a string, all others are JSON.
    """
    name, problem = parse_name(name)
    call = ToolCall(name, problem=problem)
    arguments: dict[str, object] = {}
    at = 0
    while opening_tag := opening.match(inside, at):
        key = opening_tag[1].strip()
        end = inside.find(closing, opening_tag.end())
        if end < 0:
            call = add_problem(call, f"its argument {key:.40} is not closed with {closing}")
            return replace(call, arguments=arguments)
        if key in arguments:
            call = add_problem(call, f"its argument {key:.40} is given twice")
        value = inside[opening_tag.end() : end]
        arguments[key] = value
        if text and opening_tag[2] != text:
            parsed, stop, error = parse_json(value)
            if error or value[stop:].strip():
                call = add_problem(call, f"its argument {key:.40} is not JSON: {error or 'there is more after it'}")
            else:
                arguments[key] = parsed
        at = end + len(closing)
    if surplus := inside[at:].strip():
        call = add_problem(call, f"there is text that belongs to no argument: {surplus[:40]!r}")
    return replace(call, arguments=arguments)


@dataclass(frozen=True, slots=True)
class JsonCall:
    """The keys under which a format writes a whole call as one JSON object."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    id: str = ""
    """Empty if the format has no call ids."""

    def parse(self, text: str) -> list[ToolCall]:
        """Parse one call object."""
        return self._parse(text, as_list=False)

    def parse_list(self, text: str) -> list[ToolCall]:
        """Parse a list of call objects."""
        return self._parse(text, as_list=True)

    def _parse(self, text: str, *, as_list: bool) -> list[ToolCall]:
        value, end, error = parse_json(text)
        if error:
            return [self.invalid_json(text, error)]
        if not as_list:
            calls = [self.from_value(value)]
        elif isinstance(value, list):
            calls = [self.from_value(entry) for entry in value] or [ToolCall("", problem="its list holds no call")]
        else:
            calls = [add_problem(self.from_value(value), "it is not in a list")]
        if end < len(text) and (surplus := text[end:].strip()):
            calls[-1] = add_problem(calls[-1], f"there is more after its JSON: {surplus[:40]!r}")
        return calls

    def invalid_json(self, text: str, error: str) -> ToolCall:
        """A call that reports invalid JSON, with the call's name if it can be recovered."""
        name_match = _NAME_IN_JSON.match(text)
        subject = "its arguments are" if name_match else "it is"
        return ToolCall(name_match[1] if name_match else "", problem=f"{subject} not JSON: {error}")

    def from_value(self, value: object) -> ToolCall:
        """Build a call from one decoded JSON value."""
        if not isinstance(value, dict):
            return ToolCall("", problem=f'it is {json_type(value)}, not an object with "{self.name}"')
        name = value.get(self.name)
        problem = ""
        if not isinstance(name, str) or not name:
            missing = name is None or name == ""
            problem = (
                _missing_key(value, self.name) if missing else f'its "{self.name}" is {json_type(name)}, not a string'
            )
            name = ""
        id = value.get(self.id) if self.id else ""
        id = id if isinstance(id, str) else ""
        for key in self.arguments:
            if key in value:
                return _build_call(name, value[key], id, problem)
        call = ToolCall(name, {}, id, problem)
        # A name alone is a call without arguments; other keys mean that the arguments are under a wrong key.
        return add_problem(call, _missing_key(value, self.arguments[0])) if len(value) > 1 else call


def _missing_key(value: Mapping[str, object], key: str) -> str:
    present = ", ".join(f'"{present:.40}"' for present in list(value)[:8])
    return f'it has no "{key}" (it has {present or "nothing"})'
