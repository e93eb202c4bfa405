"""A function's parameters as JSON Schema, and the checking of what a model sends against them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import docstring_parser
import pydantic
from typing_extensions import NotRequired, TypedDict

from agentfly.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a tool takes."""

    tool: str
    description: str
    """The docstring without its argument section."""
    schema: dict[str, Any]
    adapter: pydantic.TypeAdapter[dict[str, Any]]

    @classmethod
    def of(cls, tool: str, function: Callable[..., Any], hints: Mapping[str, Any], hidden: set[str]) -> Arguments:
        """Read a function. `hidden` names the parameters that are injected."""
        documented = docstring_parser.parse(inspect.getdoc(function) or "")
        told = {p.arg_name: p.description or "" for p in documented.params}
        fields: dict[str, Any] = {}
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        for name, parameter in inspect.signature(function).parameters.items():
            if name in hidden:
                continue
            if parameter.kind is parameter.VAR_KEYWORD:
                config["extra"] = "allow"
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"tool {tool!r}: {parameter} cannot be filled by name; a model sends arguments by name")
            else:
                fields[name] = _field(hints[name], told.get(name, ""), parameter.default)
        taken = TypedDict("Arguments", fields)  # type: ignore[operator]
        taken.__pydantic_config__ = config
        try:
            adapter = pydantic.TypeAdapter(taken)
            schema = _tidy(adapter.json_schema())
        except pydantic.errors.PydanticUserError as error:
            raise ConfigError(f"tool {tool!r}: no JSON schema can be made of its type hints: {error.message}") from error
        description = "\n\n".join(p for p in (documented.short_description, documented.long_description) if p)
        return cls(tool, description, schema, adapter)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """The arguments, checked and coerced; or what is wrong with them, in words for the model."""
        try:
            return dict(self.adapter.validate_python(dict(arguments)))
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

    @staticmethod
    def to_text(value: Any) -> str:
        """A returned value as the model reads it: JSON where it has a JSON form, else its str."""
        try:
            return pydantic.TypeAdapter(Any).dump_json(value).decode()
        except (pydantic.PydanticSchemaGenerationError, pydantic.errors.PydanticUserError, ValueError, TypeError):
            return str(value)


def _field(hint: Any, description: str, default: Any) -> Any:
    extra: dict[str, Any] = {}
    if default is not inspect.Parameter.empty:
        try:
            json.dumps(default)
            extra["default"] = default
        except (TypeError, ValueError):
            pass  # a default that JSON cannot write is still optional; the function fills it in
    info = pydantic.Field(description=description or None, json_schema_extra=extra or None)
    field = Annotated[hint, info]
    return field if default is inspect.Parameter.empty else NotRequired[field]


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without titles, and with definitions put in where they are used, unless they hold themselves."""
    definitions = schema.pop("$defs", {})
    recursive = {name for name in definitions if _reaches(name, definitions[name], definitions, set())}

    def walk(node: Any, inside_properties: bool = False) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        name = str(node.get("$ref", "")).rpartition("/")[2]
        if name in definitions and name not in recursive:
            node = {**definitions[name], **{k: v for k, v in node.items() if k != "$ref"}}
        return {
            key: walk(value, inside_properties=key == "properties" and not inside_properties)
            for key, value in node.items()
            if inside_properties or key != "title"
        }

    out: dict[str, Any] = walk(schema)
    if recursive:
        out["$defs"] = {name: walk(definitions[name]) for name in sorted(recursive)}
    out.setdefault("properties", {})
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
    where = ".".join(map(str, location))
    if kind == "missing":
        return f"{where!r} is missing"
    if kind == "extra_forbidden":
        return f"there is no argument {where!r}"
    return f"{where!r}: {message[0].lower()}{message[1:]}" if message else repr(where)


def _type_name(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return "one of " + ", ".join(json.dumps(value) for value in spec["enum"])
    if "const" in spec:
        return json.dumps(spec["const"])
    if "anyOf" in spec:
        return " or ".join(_type_name(option) for option in spec["anyOf"])
    return str(spec.get("type", "anything"))
