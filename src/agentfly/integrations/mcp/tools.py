"""Tools of an MCP server as AgentFly tools: names, schemas, validation of arguments, results as observations."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast
from urllib.parse import unquote

import jsonschema
import mcp_types
from referencing import Registry
from referencing.exceptions import Unresolvable

from agentfly.errors import ConfigError, DataError
from agentfly.tooling import Tool, ToolResult
from agentfly.tooling.schema import ToolArguments, convert_text
from agentfly.trajectory import CallStatus
from agentfly.types import Image
from agentfly.vision.images import count_pixels, normalize_image

MAX_STRUCTURED = 1 << 16
"""Characters of structured content that are recorded with a call; a larger one is only shown, as far as it fits."""
MAX_TOOLS = 256
"""Tools of a server that the model may use."""
MAX_TOOLS_BYTES = 1 << 19
"""Bytes of the descriptions and schemas of these tools as JSON, more than 100,000 tokens of a prompt."""
MAX_SCHEMA_BYTES = 1 << 16
"""Bytes of a tool's input schema as JSON."""
MAX_SCHEMA_DEPTH = 128
"""Levels of JSON in an input schema whose references are expanded."""
MAX_SCHEMA_NODES = 20_000
"""Objects and arrays in an input schema whose references are expanded, recursive ones once."""
MAX_VALIDATION_STEPS = 50_000
"""Keywords that are evaluated for the arguments of one call, half a second. A recursive schema that uses itself twice
doubles the steps with each level of the arguments."""
MAX_IMAGES = 32
MAX_RESULT_PIXELS = 64_000_000
"""Images of one result, and pixels of all of them; a single image of this size is scaled down. The others are not
decoded: a file of some kilobytes can claim as many pixels."""
IS_ERROR = "is_error"
"""Key of a returned value that marks an error of the call, for the record."""
_UNFIT = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME = 64
"""Characters of a tool's name that APIs of models accept."""


@dataclass(frozen=True, slots=True)
class SchemaArguments(ToolArguments):
    """The parameters of a tool that are given by a JSON Schema."""

    validator: Any = None

    @classmethod
    def read(cls, tool: str, description: str, schema: Mapping[str, Any], server: str = "") -> SchemaArguments:
        """Check a schema. Raises ConfigError if it is not a JSON Schema of an object, or exceeds a bound."""
        validator_class: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            _check_bounds(
                schema, legacy=validator_class in _LEGACY
            )  # first: the other checks take time that grows with the schema
            validator_class.check_schema(schema)
            properties = schema.get("properties", {})
            if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
                raise ConfigError("it does not describe an object")
        except (jsonschema.SchemaError, ConfigError, ValueError, RecursionError, re.error) as error:
            problem = getattr(error, "message", "") or str(error)
            owner = f"the MCP tool {tool!r}" + (f" of the server {server}" if server else "")
            raise ConfigError(f"the input schema of {owner} is malformed: {problem:.300}") from error
        object_schema = {"type": "object", **{key: value for key, value in schema.items() if key != "$schema"}}
        object_schema["properties"] = dict(properties)
        # An empty registry: a `$ref` to another document is not fetched.
        keywords = {name: _count_steps(check) for name, check in {**validator_class.VALIDATORS, **_KEYWORDS}.items()}
        validator = jsonschema.validators.extend(validator_class, keywords)(object_schema, registry=Registry())
        return cls(tool, description, object_schema, adapter=cast("Any", None), validator=validator)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the arguments, or an error message for the model."""
        checked = dict(arguments)
        try:
            json.dumps(checked, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError):  # half of a surrogate pair, an infinite number, a deep nesting
            return f"Error: the arguments of {self.tool!r} cannot be written as JSON. {self.usage}"
        _STEPS_LEFT.set(MAX_VALIDATION_STEPS)
        try:
            if not self.validator.is_valid(checked):
                checked = convert_text(checked, self.schema)
            errors = list(islice(self.validator.iter_errors(checked), 5))
        except (Unresolvable, RecursionError, ValidationTooLong) as error:
            return f"Error: the arguments of {self.tool!r} cannot be checked: {error!s:.200}"
        problems = [self._describe(error) for error in errors]
        if problems:
            return f"Error: the arguments of {self.tool!r} do not fit: {'; '.join(problems)}. {self.usage}"
        return checked

    def _describe(self, error: Any) -> str:
        where = f"{'.'.join(map(str, error.path)):.80}"
        if error.validator == "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            prefix = f"{where}." if where else ""
            return "; ".join(f"{prefix + str(name)!r} is missing" for name in missing)
        return f"{where!r}: {error.message:.200}" if where else f"{error.message:.200}"


class ValidationTooLong(Exception):
    """The arguments of a call take more than `MAX_VALIDATION_STEPS` to validate."""


_STEPS_LEFT: ContextVar[int] = ContextVar("steps_left", default=MAX_VALIDATION_STEPS)


def _count_steps(check: Callable[..., Any]) -> Callable[..., Any]:
    """The check of a keyword, counted as a step of the validation."""

    def check_and_count(*args: Any) -> Any:
        if (left := _STEPS_LEFT.get()) == 0:
            raise ValidationTooLong(f"that takes more than {MAX_VALIDATION_STEPS:,} steps")
        _STEPS_LEFT.set(left - 1)
        return check(*args)

    return check_and_count


def _skip(*_: Any) -> None:
    """A keyword that only the server checks."""


def _check_additional(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
    if "patternProperties" not in schema:
        yield from jsonschema.Draft202012Validator.VALIDATORS["additionalProperties"](
            validator, value, instance, schema
        )


_KEYWORDS: dict[str, Any] = {
    **dict.fromkeys(
        ("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems", "uniqueItems"), _skip
    ),
    "additionalProperties": _check_additional,
}
"""Keywords that could take any time, as regular expressions of the server do: the model sees them, the server validates
its arguments itself."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LEGACY = (jsonschema.Draft3Validator, jsonschema.Draft4Validator)
"""Drafts whose `$id` is `id`."""
_ANCHORS = ("$anchor", "$dynamicAnchor")


def _check_bounds(schema: Any, *, legacy: bool) -> None:
    """Raise ConfigError if a schema is larger, or takes longer to validate with, than is allowed."""
    if (size := len(json.dumps(schema, allow_nan=False))) > MAX_SCHEMA_BYTES:
        raise ConfigError(f"it has {size:,} bytes; at most {MAX_SCHEMA_BYTES:,} are allowed")
    bases = ("$id", "$schema", "id") if legacy else ("$id", "$schema")
    anchors: dict[str, Any] = {}
    pending = [schema]
    for node in pending:  # all objects and arrays
        if isinstance(node, dict):
            names = [key for key in bases if isinstance(node.get(key), str)]
            if node is not schema and names:
                raise ConfigError(
                    f"a part of it has {names[0]!r}; only its root may, so that references can be bounded"
                )
            anchors |= {node[key]: node for key in _ANCHORS if isinstance(node.get(key), str)}
        pending += _children(node)
    sizes: dict[int, tuple[int, int]] = {}

    def expand(node: Any, level: int) -> tuple[int, int]:
        """Objects and arrays of a node, and its levels."""
        if id(node) not in sizes:
            if level > MAX_SCHEMA_DEPTH:
                raise ConfigError(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep, references expanded")
            sizes[id(node)] = 1, 1  # of a reference to a node around it: the arguments end such a recursion
            children = _children(node)
            if isinstance(node, dict):
                references = [_resolve(schema, anchors, node.get(key)) for key in _REFERENCES]
                children += [target for target in references if isinstance(target, dict | list)]
            expanded = [expand(child, level + 1) for child in children]
            sizes[id(node)] = (
                1 + sum(nodes for nodes, _ in expanded),
                1 + max((deep for _, deep in expanded), default=0),
            )
        nodes, levels = sizes[id(node)]
        if nodes > MAX_SCHEMA_NODES:
            raise ConfigError(f"it has more than {MAX_SCHEMA_NODES:,} objects and arrays, references expanded")
        if level + levels > MAX_SCHEMA_DEPTH + 1:
            raise ConfigError(f"it is nested more than {MAX_SCHEMA_DEPTH} levels deep, references expanded")
        return nodes, levels

    expand(schema, 1)


def _children(node: Any) -> list[Any]:
    """The objects and arrays directly inside a node."""
    values = node.values() if isinstance(node, dict) else node
    return [value for value in values if isinstance(value, dict | list)]


def _resolve(schema: Any, anchors: Mapping[str, Any], reference: Any) -> Any:
    """What a reference inside the document names; None if it names nothing."""
    if not isinstance(reference, str):
        return None
    fragment = unquote(reference.partition("#")[2])
    if fragment and not fragment.startswith("/"):
        return anchors.get(fragment)
    target = schema
    for key in fragment.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(key) if isinstance(target, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return target


class MCPTool(Tool):
    """A tool of an MCP server: a method of its environment class."""

    collision_hint = "set prefix= or rename= of the server's class"

    def __init__(self, method: Callable[..., Any], arguments: SchemaArguments, **settings: Any) -> None:
        super().__init__(method, **settings)
        self._read_arguments = arguments

    @property
    def arguments(self) -> ToolArguments:  # a cached property of the base class
        """Schema and validation of the arguments."""
        return self._read_arguments

    def _to_result(self, returned: Any, seconds: float) -> ToolResult:
        result = super()._to_result(returned, seconds)
        if result.info.get(IS_ERROR):  # the server could not do what the model asked
            result.status = CallStatus.INVALID
        return result


def choose_names(
    tools: list[str],
    *,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    rename: Mapping[str, str],
    prefix: str,
    server: str = "the server",
) -> dict[str, str]:
    """Select tools, and give each the name that the model uses: unique, and in characters that every API accepts.

    Raises ConfigError for a setting that names a tool the server does not have, and for too many tools.
    """
    for setting, names in (("include", include or ()), ("exclude", exclude), ("rename", tuple(rename))):
        if missing := [name for name in names if name not in tools]:
            offered = ", ".join(tools) or "none"
            raise ConfigError(f"{setting} names {missing[0]!r}, which the server does not offer; it has {offered}")
    selected = [tool for tool in tools if (include is None or tool in include) and tool not in exclude]
    if len(selected) > MAX_TOOLS:
        raise ConfigError(
            f"{server} offers {len(selected):,} tools; a model may use at most {MAX_TOOLS}: select them by include= "
            "or exclude= of the server's class"
        )
    chosen: dict[str, str] = {}
    for tool in selected:
        base = _UNFIT.sub("_", prefix + rename.get(tool, tool))[:_MAX_NAME] or "tool"
        name, number = base, 2
        while name in chosen.values():
            suffix = f"_{number}"
            name, number = base[: _MAX_NAME - len(suffix)] + suffix, number + 1
        chosen[tool] = name
    return chosen


def check_total_size(tools: Sequence[mcp_types.Tool], server: str) -> None:
    """Raise ConfigError if the tools of a server take more of a prompt than is allowed."""
    sizes = {tool.name: len(json.dumps([tool.description, tool.title, tool.input_schema])) for tool in tools}
    if (total := sum(sizes.values())) > MAX_TOOLS_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        raise ConfigError(
            f"the tools of {server} are described in {total:,} bytes; at most {MAX_TOOLS_BYTES:,} are allowed. The "
            f"largest is {largest!r:.80}: select tools by include= or exclude= of the server's class"
        )


def to_observation(result: mcp_types.CallToolResult, progress: list[str]) -> dict[str, Any]:
    """Convert a result to what a tool returns: text, images, and structured content for the record."""
    texts: list[str] = []
    images: list[tuple[Image, int]] = []
    for block in result.content:
        if isinstance(block, mcp_types.EmbeddedResource):
            resource = block.resource
            if isinstance(resource, mcp_types.TextResourceContents):
                texts.append(resource.text)
            else:
                _add_bytes(resource.blob, resource.mime_type or "", f"resource {resource.uri}", texts, images)
        elif isinstance(block, mcp_types.TextContent):
            texts.append(block.text)
        elif isinstance(block, mcp_types.ResourceLink):
            about = f": {block.description}" if block.description else ""
            texts.append(f"[resource {block.name} at {block.uri}{about}]")
        else:
            _add_bytes(block.data, block.mime_type, block.type, texts, images)
    returned: dict[str, Any] = {}
    if result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
        if not "".join(texts).strip():
            texts.append(text)
        if len(text) <= MAX_STRUCTURED:
            returned["structured"] = result.structured_content
    if progress:
        returned["progress"] = progress
    if result.is_error:
        returned[IS_ERROR] = True
        texts = [f"Error: {texts[0]}", *texts[1:]] if texts else ["Error: the tool failed without a message."]
    returned["observation"] = "\n".join(texts)
    if images:
        returned["image"] = [image for image, _ in images]
    return returned


def _add_bytes(data: str, mime_type: str, what: str, texts: list[str], images: list[tuple[Image, int]]) -> None:
    """Add an image and its number of pixels; or, if it cannot be shown, a text in its place."""
    if not mime_type.startswith("image/"):
        texts.append(f"[{what}: {len(data) * 3 // 4:,} bytes of {mime_type or 'unknown type'}, not shown]")
        return
    try:
        image = Image.of(base64.b64decode(data, validate=True))
        pixels = count_pixels(image)
        if len(images) == MAX_IMAGES or (images and sum(size for _, size in images) + pixels > MAX_RESULT_PIXELS):
            raise DataError(f"a result may have {MAX_IMAGES} images, of {MAX_RESULT_PIXELS:,} pixels together")
        images.append((normalize_image(image), pixels))
    except (DataError, binascii.Error, ValueError) as error:
        texts.append(f"[{what}: an image that cannot be shown: {error!s:.200}]")
