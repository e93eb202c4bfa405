"""JSON Schema of a function's parameters, and validation of the arguments a model sends."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import Any, NotRequired, Optional, TypeVar, get_type_hints

import docstring_parser
import pydantic
import pydantic_core
import typing_extensions  # pydantic requires its TypedDict before Python 3.12
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo

from agentfly.errors import ConfigError, DataError, describe

T = TypeVar("T")
_REFERENCE = re.compile(r'"\$ref": "#/\$defs/([^"]+)"')
_typed_dict: Any = typing_extensions.TypedDict  # called at run time with fields that a type checker cannot know


def caller_namespace(frame: FrameType, function: object) -> dict[str, Any]:
    """The local names in the decorator's scope that the function's string type hints may refer to."""
    hints = getattr(function, "__annotations__", {})
    mentioned = {word for hint in hints.values() for word in re.findall(r"[^\W\d]\w*", str(hint))}
    namespace: dict[str, Any] = {}
    scope: FrameType | None = frame
    while scope is not None and scope.f_locals is not scope.f_globals:
        namespace = {name: scope.f_locals[name] for name in mentioned if name in scope.f_locals} | namespace
        # A class body can use the names of the enclosing function, which is the next frame.
        scope = None if scope.f_code.co_flags & inspect.CO_OPTIMIZED else scope.f_back
    return namespace


def type_hints(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Every parameter in order with its type: Any without a hint, the exception if the hint cannot be resolved."""
    namespace = {**getattr(inspect.unwrap(function), "__globals__", {}), **names}
    hints: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hints[name] = Any
        if parameter.annotation is not parameter.empty:
            try:  # one by one: a hint that cannot be resolved may not be needed
                holder = SimpleNamespace(__annotations__={name: parameter.annotation})
                hints[name] = get_type_hints(holder, namespace, include_extras=True)[name]
            except Exception as error:
                hints[name] = error
    return hints


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """The parameters of a tool."""

    tool: str
    description: str
    """The docstring without its argument section."""
    schema: dict[str, Any]
    adapter: pydantic.TypeAdapter[dict[str, Any]]

    @classmethod
    def of(cls, tool: str, function: Callable[..., Any], hints: Mapping[str, Any]) -> ToolArguments:
        """Build the schema of a function. `hints`: the types of the parameters that the model fills."""
        documented = docstring_parser.parse(inspect.getdoc(function) or "")
        parameters = inspect.signature(function).parameters
        config = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True)
        fields: dict[str, Any] = {}
        for name, hint in hints.items():
            parameter = parameters[name]
            if parameter.kind is parameter.VAR_KEYWORD:
                config["extra"] = "allow"
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"tool {tool!r}: a model passes arguments by name, but {parameter} has none")
            elif isinstance(hint, Exception):
                raise ConfigError(
                    f"tool {tool!r}: the type hint {parameter.annotation!r} of {name!r} cannot be read "
                    f"({describe(hint)}); import what it names where the tool is defined"
                ) from hint
            elif isinstance(parameter.default, FieldInfo):
                raise ConfigError(f"tool {tool!r}: write {name}: Annotated[…, Field(…)], and the default after `=`")
            else:
                if parameter.default is None:
                    hint = Optional[hint]  # noqa: UP045 – a hint may be a string, which has no `|`
                fields[name] = hint if parameter.default is parameter.empty else NotRequired[hint]
        try:
            typed_dict = _typed_dict("Arguments", fields)
            typed_dict.__pydantic_config__ = config
            adapter: pydantic.TypeAdapter[dict[str, Any]] = pydantic.TypeAdapter(typed_dict)
            schema = adapter.json_schema()
        except (PydanticUserError, PydanticUndefinedAnnotation, TypeError) as error:
            problem = str(error).partition(". ")[0]  # what follows is advice about pydantic's own models
            raise ConfigError(f"tool {tool!r}: no JSON schema can be made of its type hints: {problem}") from error
        descriptions = {
            parameter.arg_name: parameter.description for parameter in documented.params if parameter.description
        }
        for name, spec in schema.setdefault("properties", {}).items():
            if name in descriptions:
                spec.setdefault("description", descriptions[name])
            if parameters[name].default is not inspect.Parameter.empty:
                # A default that JSON cannot represent: the parameter is optional, without a default in the schema.
                with suppress(ValueError):
                    default = pydantic_core.to_jsonable_python(parameters[name].default)
                    json.dumps(default, allow_nan=False)
                    spec.setdefault("default", default)
        description = "\n\n".join(p for p in (documented.short_description, documented.long_description) if p)
        return cls(tool, description, _tidy(schema), adapter)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the validated and coerced arguments, or an error message for the model.

        Arguments that were written as text are converted by `convert_text`.
        """
        validate = self.adapter.validator.validate_python  # returns a new dict
        try:
            try:
                checked: dict[str, Any] = validate(arguments)
            except pydantic.ValidationError:
                checked = validate(convert_text(arguments, self.schema))
            return checked
        except pydantic.ValidationError as error:
            problems = []
            for detail in error.errors(include_url=False):
                where = f"{'.'.join(map(str, detail['loc'])):.80}"
                problem = f"{where!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
                if detail["type"] == "missing":
                    problem = f"{where!r} is missing"
                elif detail["type"] == "extra_forbidden":
                    problem = f"there is no argument {where!r}"
                problems.append(problem)
            return f"Error: the arguments of {self.tool!r} do not fit: {'; '.join(problems)}. {self.usage}"

    @property
    def usage(self) -> str:
        """The parameters in one line."""
        required = self.schema.get("required", [])
        parameters = [
            f"{name}: {_type_name(spec)}" + ("" if name in required else " (optional)")
            for name, spec in self.schema["properties"].items()
        ]
        return f"It takes {', '.join(parameters)}." if parameters else "It takes no arguments."


def convert_text(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments that a model wrote as text to the types that a JSON Schema declares.

    Some formats (Qwen3-Coder, GLM, MiniMax) write every value as text. Where the schema takes text, it stays text, even
    if it is JSON. Elsewhere it is parsed as JSON, as a literal of Python ("None"), or as pydantic reads a number or a
    boolean ("True"). Text that is no value of a declared type is not changed. The schema may be malformed: what cannot
    be read of it has no effect.
    """
    return {name: _convert(value, _property_specs([schema], name), schema) for name, value in arguments.items()}


def _convert(value: Any, specs: Sequence[Any], schema: Mapping[str, Any]) -> Any:
    """Convert a value and all values in it. `specs`: alternatives for it. `schema` has the definitions."""
    options = _expand(specs, schema)
    if isinstance(value, str):
        value = _convert_leaf(value, options)
    if isinstance(value, dict):
        return {key: _convert(item, _property_specs(options, key), schema) for key, item in value.items()}
    if isinstance(value, list):
        return [_convert(item, [spec.get("items") for spec in options], schema) for item in value]
    return value


def drop_nulls(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Remove nulls that a JSON Schema does not take, as in the arguments of a dataset.

    Arrow stores the calls of all tools in one type, so every call has a null for each argument of the other tools.
    """
    return _drop_nulls(dict(arguments), [schema], schema)  # type: ignore[no-any-return]


def _drop_nulls(value: Any, specs: Sequence[Any], schema: Mapping[str, Any]) -> Any:
    options = _expand(specs, schema)
    if isinstance(value, list):
        return [_drop_nulls(item, [spec.get("items") for spec in options], schema) for item in value]
    if not isinstance(value, dict) or not options:
        return value
    kept = {}
    for key, item in value.items():
        declared = [spec["properties"][key] for spec in options if key in _read(spec, "properties", dict)]
        item_specs = declared or [_additional_properties(spec) for spec in options]
        if item is not None or any(map(_takes_null, _expand(item_specs, schema))):
            kept[key] = _drop_nulls(item, item_specs, schema)
    return kept


def _additional_properties(spec: Mapping[str, Any]) -> Any:
    """The specification of properties that are not declared; False if there may be none. A schema that declares some
    and does not mention others is read as complete."""
    default = "properties" not in spec and not (spec.keys() & _CONSTRAINTS - {"type"})
    additional = spec.get("additionalProperties", default)
    return {} if additional is True else additional


def _takes_null(spec: Mapping[str, Any]) -> bool:
    kinds = spec.get("type")
    values = [*_read(spec, "enum", list), spec.get("const", ...)]
    return not spec.keys() & _CONSTRAINTS or "null" in (kinds if isinstance(kinds, list) else [kinds]) or None in values


def _expand(specs: Sequence[Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The specifications with those that they combine or refer to, each once: references may form circles."""
    options: list[Mapping[str, Any]] = []
    pending = deque(specs)
    while pending and len(options) < _MAX_OPTIONS:
        spec = pending.popleft()
        if not isinstance(spec, Mapping) or any(spec is option for option in options):
            continue
        options.append(spec)
        for key in ("$defs", "definitions"):
            pending.append(_read(schema, key, dict).get(_read(spec, "$ref", str).removeprefix(f"#/{key}/")))
        for key in ("anyOf", "oneOf", "allOf"):
            pending += _read(spec, key, list)
    return options


def _property_specs(options: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    declared = [_read(spec, "properties", dict).get(name) for spec in options]
    return declared if any(declared) else [spec.get("additionalProperties") for spec in options]


def _convert_leaf(text: str, options: Sequence[Mapping[str, Any]]) -> Any:
    kinds = {kind for spec in options for kind in (_read(spec, "type", str), *map(str, _read(spec, "type", list)))} - {
        ""
    }
    constants = [constant for spec in options if "type" not in spec for constant in _read(spec, "enum", list)]
    constants += [spec["const"] for spec in options if "type" not in spec and "const" in spec]
    if "string" in kinds or text in constants or not (kinds or constants):
        return text
    if "number" in kinds:
        kinds.add("integer")
    parsed: Any = text
    try:
        value = pydantic_core.from_json(text, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # 1e999 is infinite, and a client could not read it
        parsed = value
    except (TypeError, ValueError):  # TypeError: half of a surrogate pair, which is not text
        if kinds & {"array", "object", "null"}:
            # Some templates write such values as Python does: Qwen3-Coder `None`, MiniCPM5 `['a']`.
            with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                parsed = json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
    if _JSON_KINDS.get(type(parsed)) in kinds or any(type(parsed) is type(c) and parsed == c for c in constants):
        return parsed
    for kind, adapter in _LENIENT.items():
        for candidate in (parsed, text) if kind in kinds else ():
            with suppress(TypeError, ValueError):
                return adapter.validate_python(candidate)
    return text


def _read(spec: Mapping[str, Any], key: str, kind: type[T]) -> T:
    """A value of a schema, which may be foreign; an empty one if it is absent or of another type."""
    value = spec.get(key)
    return value if isinstance(value, kind) else kind()


_CONSTRAINTS = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
"""Keywords that limit which values a specification takes."""
_MAX_OPTIONS = 64
"""Maximum number of combined specifications of one value that are read."""
_JSON_KINDS = {int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}
_LENIENT: dict[str, pydantic.TypeAdapter[Any]] = {
    "integer": pydantic.TypeAdapter(int),
    "number": pydantic.TypeAdapter(pydantic.FiniteFloat),
    "boolean": pydantic.TypeAdapter(bool),
}


def read_tool_schemas(column: Any) -> list[dict[str, Any]] | None:
    """Read the column `tools` of a row as schemas in OpenAI form; None if it is empty. Raises DataError.

    The column and each schema in it may be JSON text, as TRL and ShareGPT files store them, and a schema may be a bare
    function. Nulls are dropped: Arrow stores all schemas of a file in one type, so each has the properties of all.
    """
    column = _parse_json(column)
    if column is None:
        return None
    if not isinstance(column, list):
        raise DataError(f"the column 'tools' must be a list of schemas, not {column!r:.80}")
    schemas = []
    for schema in (_remove_nulls(_parse_json(item)) for item in column):
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(f"the column 'tools' has {schema!r:.80}, which is not the schema of a function")
        if not isinstance(function.get("parameters"), Mapping):
            function = {**function, "parameters": {"type": "object", "properties": {}}}
        schemas.append({"type": "function", "function": function})
    return schemas


def _parse_json(value: Any) -> Any:
    """Parse text; blank text is None, and what is no text is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"the column 'tools' is not JSON: {error}") from error


def _remove_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_remove_nulls(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _remove_nulls(item) for key, item in value.items() if item is not None}
    return value


def to_text(value: Any) -> str:
    """Convert a returned value to text: JSON if it has a JSON form, else its str."""
    try:
        return pydantic_core.to_json(value, inf_nan_mode="constants").decode()
    except ValueError:
        return str(value)


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove titles and inline definitions, except recursive ones."""
    definitions = schema.pop("$defs", {})
    # The definitions that each one refers to, directly or through others.
    refers = {name: set(_REFERENCE.findall(json.dumps(spec))) for name, spec in definitions.items()}
    for through in definitions:
        for names in refers.values():
            names |= refers[through] if through in names else set()
    recursive = {name for name in definitions if name in refers[name]}

    def walk(node: Any, inside_properties: bool = False) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        if inside_properties:  # the keys are argument names, which may be `title` or `default`
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


def _type_name(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return "one of " + ", ".join(json.dumps(value) for value in spec["enum"])
    if "const" in spec:
        return json.dumps(spec["const"])
    if options := spec.get("anyOf") or spec.get("oneOf"):
        return " or ".join(_type_name(option) for option in options)
    return str(spec.get("type", "object" if "$ref" in spec else "anything"))
