"""Tools of an MCP server as AgentFly tools: names, schemas, validation of arguments, results as observations."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jsonschema
import mcp_types
from referencing import Registry
from referencing.exceptions import Unresolvable

from agentfly.errors import ConfigError, DataError
from agentfly.images import normalize_image
from agentfly.schema import ToolArguments, convert_text
from agentfly.tooling import Tool, ToolResult
from agentfly.trajectory import CallStatus
from agentfly.types import Image

MAX_STRUCTURED = 1 << 16
"""Characters of structured content that are recorded with a call; a larger one is only shown, as far as it fits."""
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
    def read(cls, tool: str, description: str, schema: Mapping[str, Any]) -> SchemaArguments:
        """Check a schema. Raises ConfigError if it is not a JSON Schema of an object."""
        validator_class: Any = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            validator_class.check_schema(schema)
            properties = schema.get("properties", {})
            if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
                raise ConfigError("it does not describe an object")
            json.dumps(schema, allow_nan=False)
        except (jsonschema.SchemaError, ConfigError, ValueError, RecursionError, re.error) as error:
            problem = getattr(error, "message", "") or str(error)
            raise ConfigError(f"the input schema of the MCP tool {tool!r} is malformed: {problem:.300}") from error
        shown = {"type": "object", **{key: each for key, each in schema.items() if key != "$schema"}}
        shown["properties"] = dict(properties)
        # An empty registry: a `$ref` to another document is not fetched.
        validator = validator_class(shown, registry=Registry())
        return cls(tool, description, shown, adapter=cast("Any", None), validator=validator)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """Return the arguments, or an error message for the model."""
        given = dict(arguments)
        try:
            json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError):  # half of a surrogate pair, an infinite number, a deep nesting
            return f"Error: the arguments of {self.tool!r} cannot be written as JSON. {self.usage}"
        try:
            errors = list(self.validator.iter_errors(given))
            if errors:
                given = convert_text(given, self.schema)
                errors = list(self.validator.iter_errors(given))
        except (Unresolvable, RecursionError) as error:
            return f"Error: the arguments of {self.tool!r} cannot be checked: {error!s:.200}"
        problems = [self._describe(each) for each in errors[:5]]
        if problems:
            return f"Error: the arguments of {self.tool!r} do not fit: {'; '.join(problems)}. {self.usage}"
        return given

    def _describe(self, error: Any) -> str:
        where = f"{'.'.join(map(str, error.path)):.80}"
        if error.validator == "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            prefix = f"{where}." if where else ""
            return "; ".join(f"{prefix + str(name)!r} is missing" for name in missing)
        return f"{where!r}: {error.message:.200}" if where else f"{error.message:.200}"


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
) -> dict[str, str]:
    """Select tools, and give each the name that the model uses: unique, and in characters that every API accepts.

    Raises ConfigError for a setting that names a tool the server does not have.
    """
    for setting, names in (("include", include or ()), ("exclude", exclude), ("rename", tuple(rename))):
        if missing := [name for name in names if name not in tools]:
            there = ", ".join(tools) or "none"
            raise ConfigError(f"{setting} names {missing[0]!r}, which the server does not offer; it has {there}")
    chosen: dict[str, str] = {}
    for tool in tools:
        if (include is not None and tool not in include) or tool in exclude:
            continue
        base = _UNFIT.sub("_", prefix + rename.get(tool, tool))[:_MAX_NAME] or "tool"
        name, number = base, 2
        while name in chosen.values():
            suffix = f"_{number}"
            name, number = base[: _MAX_NAME - len(suffix)] + suffix, number + 1
        chosen[tool] = name
    return chosen


def to_observation(result: mcp_types.CallToolResult, progress: list[str]) -> dict[str, Any]:
    """Convert a result to what a tool returns: text, images, and structured content for the record."""
    texts: list[str] = []
    images: list[Image] = []
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
        if not any(each.strip() for each in texts):
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
        returned["image"] = images
    return returned


def _add_bytes(data: str, mime_type: str, what: str, texts: list[str], images: list[Image]) -> None:
    """Add an image; or, if it cannot be shown, a text in its place."""
    if not mime_type.startswith("image/"):
        texts.append(f"[{what}: {len(data) * 3 // 4:,} bytes of {mime_type or 'unknown type'}, not shown]")
        return
    try:
        images.append(normalize_image(Image.of(base64.b64decode(data, validate=True))))
    except (DataError, binascii.Error, ValueError) as error:
        texts.append(f"[{what}: an image that cannot be shown: {error!s:.200}]")
