"""A function's parameters as JSON Schema, and the checking of what a model sends against them."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any, NotRequired, Optional, get_type_hints

import docstring_parser
import pydantic
import pydantic_core
import typing_extensions  # pydantic wants its TypedDict before Python 3.12
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo

from agentfly.errors import ConfigError, describe

_typed_dict: Any = typing_extensions.TypedDict  # made at run time, of fields that no type checker can know


def names_in_sight(frame: FrameType, function: object) -> dict[str, Any]:
    """The local names, where a function is decorated, that its type hints mention: a string hint may need them."""
    hints = getattr(function, "__annotations__", {})
    mentioned = {word for hint in hints.values() for word in re.findall(r"[^\W\d]\w*", str(hint))}
    found: dict[str, Any] = {}
    scope: FrameType | None = frame
    while scope is not None and scope.f_locals is not scope.f_globals:
        found = {name: scope.f_locals[name] for name in mentioned if name in scope.f_locals} | found
        # A class body sees the function around it, and that is where it is run from.
        scope = None if scope.f_code.co_flags & inspect.CO_OPTIMIZED else scope.f_back
    return found


def type_hints(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter in order, with its type: Any where none is written, the error where it cannot be read."""
    seen = {**getattr(inspect.unwrap(function), "__globals__", {}), **names}
    hints: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hints[name] = Any
        if parameter.annotation is not parameter.empty:
            try:  # one by one: a hint that cannot be read need not be one that matters
                written = SimpleNamespace(__annotations__={name: parameter.annotation})
                hints[name] = get_type_hints(written, seen, include_extras=True)[name]
            except Exception as error:
                hints[name] = error
    return hints


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a tool takes."""

    tool: str
    description: str
    """The docstring without its argument section."""
    schema: dict[str, Any]
    adapter: pydantic.TypeAdapter[dict[str, Any]]

    @classmethod
    def of(cls, tool: str, function: Callable[..., Any], hints: Mapping[str, Any]) -> Arguments:
        """Read a function. `hints` has the types of the parameters that the model fills."""
        documented = docstring_parser.parse(inspect.getdoc(function) or "")
        parameters = inspect.signature(function).parameters
        config = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        fields: dict[str, Any] = {}
        for name, hint in hints.items():
            parameter = parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                config["extra"] = "allow"
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"tool {tool!r}: a model sends arguments by name, and {parameter} cannot be given so")
            else:
                fields[name] = _field(tool, parameter, hint)
        try:
            taken = _typed_dict("Arguments", fields)
            taken.__pydantic_config__ = config
            adapter: pydantic.TypeAdapter[dict[str, Any]] = pydantic.TypeAdapter(taken)
            schema = adapter.json_schema()
        except (PydanticUserError, PydanticUndefinedAnnotation, TypeError) as error:
            why = str(error).partition(". ")[0]  # what follows is advice about pydantic's own models
            raise ConfigError(f"tool {tool!r}: no JSON schema can be made of its type hints: {why}") from error
        for name, spec in schema.setdefault("properties", {}).items():
            _annotate(spec, documented, parameters[name])
        description = "\n\n".join(p for p in (documented.short_description, documented.long_description) if p)
        return cls(tool, description, _tidy(schema), adapter)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """The arguments, checked and coerced; or what is wrong with them, in words for the model.

        Some formats (Qwen3-Coder, GLM) write every argument as text. A parameter that takes strings gets the text
        itself, even if it is JSON; for any other parameter the text is parsed as JSON.
        """
        given = dict(arguments)
        try:
            try:
                return dict(self.adapter.validate_python(given))
            except pydantic.ValidationError as error:
                wrongly_typed = {str(e["loc"][0]) for e in error.errors(include_url=False) if e["loc"]}
                parsed = {name: _parse_text(given[name]) for name in wrongly_typed & given.keys()}
                return dict(self.adapter.validate_python(given | parsed))
        except pydantic.ValidationError as error:
            wrong = "; ".join(_problem(e["loc"], e["type"], e["msg"]) for e in error.errors(include_url=False))
            return f"Error: the arguments of {self.tool!r} do not fit: {wrong}. {self.usage}"

    @property
    def usage(self) -> str:
        """How the tool is called, in one line."""
        required = self.schema.get("required", [])
        shown = [
            f"{name}: {_type_name(spec)}" + ("" if name in required else " (optional)")
            for name, spec in self.schema["properties"].items()
        ]
        return f"It takes {', '.join(shown)}." if shown else "It takes no arguments."


def _parse_text(value: Any) -> Any:
    """The value of JSON text; any other value, also text that is a quoted string, stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        parsed = pydantic_core.from_json(value, allow_inf_nan=False)
    except ValueError:
        return value
    return value if isinstance(parsed, str) else parsed


def to_text(value: Any) -> str:
    """A returned value as the model reads it: JSON where it has a JSON form, else its str."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants").decode()
    except ValueError:
        return str(value)


def _field(tool: str, parameter: inspect.Parameter, hint: Any) -> Any:
    if isinstance(hint, Exception):
        raise ConfigError(
            f"tool {tool!r}: the type hint {parameter.annotation!r} of {parameter.name!r} cannot be read "
            f"({describe(hint)}); import what it names where the tool is defined"
        ) from hint
    default = parameter.default
    if isinstance(default, FieldInfo):
        raise ConfigError(f"tool {tool!r}: write {parameter.name}: Annotated[…, Field(…)], and the default after `=`")
    if default is None:
        hint = Optional[hint]  # noqa: UP045 – a hint may be a string, which has no `|`
    return hint if default is parameter.empty else NotRequired[hint]


def _annotate(spec: dict[str, Any], documented: docstring_parser.Docstring, parameter: inspect.Parameter) -> None:
    """Add what the docstring says of a parameter, and its default."""
    said = next((p.description for p in documented.params if p.arg_name == parameter.name), None)
    if said:
        spec.setdefault("description", said)
    if parameter.default is not parameter.empty:
        try:
            default = pydantic_core.to_jsonable_python(parameter.default)
            json.dumps(default, allow_nan=False)
        except ValueError:
            return  # a default that JSON cannot write is still optional; the function fills it in
        spec.setdefault("default", default)


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without titles, and with definitions put in where they are used, unless they hold themselves."""
    definitions = schema.pop("$defs", {})
    recursive = {name for name in definitions if _reaches(name, definitions[name], definitions, set())}

    def walk(node: Any, inside_properties: bool = False) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        if inside_properties:  # its keys are the names of arguments, `title` and `default` among them
            return {name: walk(spec) for name, spec in node.items()}
        name = str(node.get("$ref", "")).rpartition("/")[2]
        if name in definitions and name not in recursive:
            return walk({**definitions[name], **{k: v for k, v in node.items() if k != "$ref"}})
        return {
            key: value if key in ("default", "const", "enum", "examples") else walk(value, key == "properties")
            for key, value in node.items()
            if key not in ("title", "discriminator")
        }

    out: dict[str, Any] = walk(schema)
    if recursive:
        out["$defs"] = {name: walk(definitions[name]) for name in sorted(recursive)}
    return out


def _reaches(target: str, node: Any, definitions: Mapping[str, Any], seen: set[str]) -> bool:
    if isinstance(node, list):
        return any(_reaches(target, item, definitions, seen) for item in node)
    if not isinstance(node, dict):
        return False
    name = str(node.get("$ref", "")).rpartition("/")[2]
    if name == target:
        return True
    if name in definitions and name not in seen:
        seen.add(name)
        return _reaches(target, definitions[name], definitions, seen)
    return any(_reaches(target, value, definitions, seen) for value in node.values())


def _problem(location: tuple[int | str, ...], kind: str, message: str) -> str:
    where = f"{'.'.join(map(str, location)):.80}"
    if kind == "missing":
        return f"{where!r} is missing"
    if kind == "extra_forbidden":
        return f"there is no argument {where!r}"
    return f"{where!r}: {message[:1].lower()}{message[1:]}"


def _type_name(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return "one of " + ", ".join(json.dumps(value) for value in spec["enum"])
    if "const" in spec:
        return json.dumps(spec["const"])
    if options := spec.get("anyOf") or spec.get("oneOf"):
        return " or ".join(_type_name(option) for option in options)
    return str(spec.get("type", "object" if "$ref" in spec else "anything"))
