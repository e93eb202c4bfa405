"""Reading one call: its JSON, its name, its values, and saying what is wrong with them.

Nothing is repaired: a model learns the format only if a slip stays a slip. The one leniency is a raw newline
or tab inside a JSON string, which has a single meaning. A value that a record could not keep (NaN, half a
surrogate pair, nesting without end) counts as unreadable here, so that no later stage meets it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from agentfly.types import ToolCall

DEPTH = 100
"""How deep lists and objects may nest: far less than what would break writing them down again."""

_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[\w.:/-]{1,128}")
_NAME_IN_JSON = re.compile(r'[\s\[]*\{\s*"(?:tool_)?name"\s*:\s*"([^"\\]+)"')


def _refuse(constant: str) -> float:
    raise ValueError(f"JSON has no {constant}")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits:.40} is too large")
    return number


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite)


def read_json(text: str, at: int = 0) -> tuple[object, int, str]:
    """Read the JSON value at `at`: the value, where it ends, and what is wrong ("" when it read well)."""
    if space := _SPACE.match(text, at):
        at = space.end()
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        place = f"near {text[error.pos : error.pos + 16]!r}" if error.pos < len(text) else "where it ends"
        return None, at, f"{error.msg} at character {error.pos}, {place}"
    except ValueError as error:
        return None, at, str(error)
    except RecursionError:
        return None, at, f"it is nested more than {DEPTH} deep"
    written = text[at:end]
    if "\\u" in written or written.count("[") + written.count("{") > DEPTH:
        return value, end, unkeepable(value)
    return value, end, ""


def unkeepable(value: object) -> str:
    """Say why a record could not keep `value`; "" when it can."""
    level, depth = [value], -1
    while level:
        level = [child for parent in level for child in _children(parent)]
        depth += 1
    if depth > DEPTH:
        return f"it is nested more than {DEPTH} deep"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "it holds half of a surrogate pair (a \\ud… escape without its partner)"
    except ValueError as error:  # a number of more digits than Python writes
        return str(error)
    return ""


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def kind_of(value: object) -> str:
    """Name the kind of a JSON value in JSON's words."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return words.get(type(value), "a number")


def with_problem(call: ToolCall, problem: str) -> ToolCall:
    """Add a problem to those the call has."""
    return replace(call, problem=f"{call.problem}; {problem}" if call.problem else problem)


def read_name(text: str) -> tuple[str, str]:
    """Read a name that stands as plain text: the name, and what is wrong with it."""
    name = text.strip()
    if _NAME.fullmatch(name):
        return name, ""
    return "", f"it has no readable name (there stands {name[:40]!r})" if name else "it has no name"


def named_call(name: str, arguments: str, id: str = "") -> ToolCall:
    """Make a call of a name and the JSON text of its arguments, for formats that write the two apart."""
    name, problem = read_name(name)
    value, end, wrong = read_json(arguments)
    if wrong:
        return with_problem(ToolCall(name, {}, id, problem), f"its arguments are not JSON: {wrong}")
    call = _call_with(name, value, id, problem)
    rest = arguments[end:].strip()
    return with_problem(call, f"there is more after its arguments: {rest[:40]!r}") if rest else call


def _call_with(name: str, arguments: object, id: str, problem: str) -> ToolCall:
    if isinstance(arguments, dict):
        return ToolCall(name, arguments, id, problem)
    wrong = f"its arguments are {kind_of(arguments)}, not a JSON object"
    return with_problem(ToolCall(name, {}, id, problem), wrong)


def tagged_call(name: str, inside: str, opening: re.Pattern[str], closing: str) -> ToolCall:
    """Make a call of a name and arguments that stand as text between tags.

    `opening` matches up to the value, with the argument's name as its group. The formats have no escapes: a
    value ends at the first `closing`. Values stay text, also where they are JSON: the schema of the tool decides what
    they are (see `agentfly.schema`).
    """
    name, problem = read_name(name)
    arguments: dict[str, object] = {}
    at = 0
    while found := opening.match(inside, at):
        key, end = found[1].strip(), inside.find(closing, found.end())
        if end < 0:
            wrong = f"its argument {key:.40} is not closed with {closing}"
            return with_problem(ToolCall(name, arguments, problem=problem), wrong)
        if key in arguments:
            problem = problem or f"its argument {key:.40} is given twice"
        arguments[key] = inside[found.end() : end]
        at = end + len(closing)
    call = ToolCall(name, arguments, problem=problem)
    rest = inside[at:].strip()
    return with_problem(call, f"there is text that belongs to no argument: {rest[:40]!r}") if rest else call


@dataclass(frozen=True, slots=True)
class JsonCall:
    """How a format writes a whole call as one JSON object: under which keys."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments",)
    id: str = ""
    """Empty when the format carries no ids."""

    def read(self, text: str) -> list[ToolCall]:
        """Read one call object."""
        return self._read(text, self._one)

    def read_list(self, text: str) -> list[ToolCall]:
        """Read a list of call objects."""
        return self._read(text, self._several)

    def _read(self, text: str, calls_of: Callable[[object], list[ToolCall]]) -> list[ToolCall]:
        value, end, wrong = read_json(text)
        if wrong:
            return [self.broken(text, wrong)]
        calls = calls_of(value)
        if end < len(text) and (rest := text[end:].strip()):
            calls[-1] = with_problem(calls[-1], f"there is more after its JSON: {rest[:40]!r}")
        return calls

    def _one(self, value: object) -> list[ToolCall]:
        return [self.call(value)]

    def _several(self, value: object) -> list[ToolCall]:
        if not isinstance(value, list):
            return [with_problem(self.call(value), "it does not stand in a list")]
        return [self.call(each) for each in value] or [ToolCall("", problem="its list holds no call")]

    def broken(self, text: str, wrong: str) -> ToolCall:
        """Say that the text is not JSON, under the call's name if that much can be read."""
        found = _NAME_IN_JSON.match(text)
        subject = "its arguments are" if found else "it is"
        return ToolCall(found[1] if found else "", problem=f"{subject} not JSON: {wrong}")

    def call(self, value: object) -> ToolCall:
        """Make a call of one JSON value."""
        if not isinstance(value, dict):
            return ToolCall("", problem=f'it is {kind_of(value)}, not an object with "{self.name}"')
        name, problem = value.get(self.name), ""
        if not isinstance(name, str) or not name:
            named = name is not None and name != ""
            problem = f'its "{self.name}" is {kind_of(name)}, not a string' if named else self._lacks(value)
            name = ""
        id = value.get(self.id) if self.id else ""
        id = id if isinstance(id, str) else ""
        for key in self.arguments:
            if key in value:
                return _call_with(name, value[key], id, problem)
        call = ToolCall(name, {}, id, problem)
        # A lone name is a call without arguments; beside other keys, the arguments stand under a wrong one.
        return with_problem(call, self._lacks(value, self.arguments[0])) if len(value) > 1 else call

    def _lacks(self, value: Mapping[str, object], key: str = "") -> str:
        present = ", ".join(f'"{present:.40}"' for present in list(value)[:8])
        return f'it has no "{key or self.name}" (it has {present or "nothing"})'
