"""Schemas of tools, and validation of the arguments that the model sends."""

import dataclasses
import datetime
import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional, Union

import pydantic
import pytest
from annotated_types import Gt
from pydantic import Field

from agentfly import tool
from agentfly.errors import ConfigError
from agentfly.tooling import Tool
from agentfly.tooling.schema import drop_nulls


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    SMALL = 1
    LARGE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Line(pydantic.BaseModel):
    """From here to there."""

    start: Point
    end: Point
    title: str = Field("", description="What it is called.")


class Tree(pydantic.BaseModel):
    value: int
    children: list["Tree"] = []


def parameters(tool_of_function: Tool) -> dict[str, Any]:
    schema = tool_of_function.schema
    assert schema["type"] == "function"
    assert schema["function"].keys() == {"name", "description", "parameters"}
    out: dict[str, Any] = schema["function"]["parameters"]
    assert (out["type"], out["additionalProperties"]) == ("object", False)
    return out


def spec(hint: Any) -> Any:
    def takes(value) -> None:  # type: ignore[no-untyped-def]
        """Take a value."""

    takes.__annotations__["value"] = hint
    out = parameters(tool(takes))
    assert out["required"] == ["value"]
    return out["properties"]["value"]


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"default": 0, "type": "integer"}},
    "required": ["x"],
}


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (str, {"type": "string"}),
        (Any, {}),
        (list, {"type": "array", "items": {}}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict, {"type": "object", "additionalProperties": True}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (Union[int, str], {"anyOf": [{"type": "integer"}, {"type": "string"}]}),  # noqa: UP007
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal["a"], {"type": "string", "const": "a"}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (Size, {"type": "integer", "enum": [1, 2]}),
        (Point, {**POINT, "additionalProperties": False}),
        (list[Point], {"type": "array", "items": {**POINT, "additionalProperties": False}}),
        (Annotated[int, Field(gt=0, description="N")], {"type": "integer", "exclusiveMinimum": 0, "description": "N"}),
        (Annotated[int, Gt(3)], {"type": "integer", "exclusiveMinimum": 3}),
        (datetime.date, {"type": "string", "format": "date"}),
    ],
    ids=str,
)  # fmt: skip
def test_the_schema_of_a_type(hint: Any, expected: dict[str, Any]) -> None:
    assert spec(hint) == expected


def test_a_nested_model_is_written_out_where_it_is_used() -> None:
    line = spec(Line)
    assert line["description"] == "From here to there."
    assert line["properties"]["start"] == POINT
    assert line["properties"]["title"] == {"type": "string", "default": "", "description": "What it is called."}
    assert "$ref" not in str(line)


def test_a_recursive_model_keeps_its_definition() -> None:
    @tool
    def grow(tree: Tree, second: Tree) -> str:
        """Grow."""
        return str(tree.children[0].value)

    out = parameters(grow)
    assert out["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert out["$defs"]["Tree"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Tree"}
    checked = grow.arguments.check({"tree": {"value": 1, "children": [{"value": 2}]}, "second": {"value": 3}})
    assert isinstance(checked, dict)
    assert grow(**checked) == "2"
    assert "tree: object" in grow.arguments.usage


def test_discriminated_union_has_no_dangling_reference() -> None:
    class Cat(pydantic.BaseModel):
        kind: Literal["cat"]

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]

    assert "$defs" not in str(spec(Annotated[Cat | Dog, Field(discriminator="kind")]))


def test_arguments_may_have_the_names_that_schemas_use() -> None:
    @tool
    def odd(title: str, default: int, properties: str, type: str, function: str, arguments: str, name: str) -> None:
        """Odd."""

    out = parameters(odd)
    assert out["properties"].keys() == {"title", "default", "properties", "type", "function", "arguments", "name"}
    assert out["properties"]["title"] == {"type": "string"}


def test_defaults_make_an_argument_optional_and_are_shown_where_json_can() -> None:
    nowhere = object()

    @tool
    def go(
        to: str,
        steps: int = 3,
        how: Colour = Colour.RED,
        at: Point = Point(1),  # noqa: B008 – what users write
        secret: Any = nowhere,
        limit: int = None,  # type: ignore[assignment]  # noqa: RUF013
    ) -> str:
        """Go."""
        return f"{to} {steps} {how} {at} {secret is nowhere} {limit}"

    out = parameters(go)
    assert out["required"] == ["to"]
    assert {name: spec.get("default", "–") for name, spec in out["properties"].items()} == {
        "to": "–",
        "steps": 3,
        "how": "red",
        "at": {"x": 1, "y": 0},
        "secret": "–",
        "limit": None,
    }
    assert go(**go.arguments.check({"to": "x"})) == f"x 3 {Colour.RED} {Point(1)} True None"
    assert go.arguments.check({"to": "x", "limit": None}) == {"to": "x", "limit": None}


def google(a: int, b: str = "x") -> None:
    """Do a thing.

    At some length.

    Args:
        a: The first
            of them.
        b (str): The second.

    Returns:
        Nothing.
    """


def numpy(a: int, b: str = "x") -> None:
    """Do a thing.

    At some length.

    Parameters
    ----------
    a : int
        The first
        of them.
    b : str
        The second.
    """


def rest(a: int, b: str = "x") -> None:
    """Do a thing.

    At some length.

    :param a: The first
        of them.
    :param str b: The second.
    """


@pytest.mark.parametrize("function", [google, numpy, rest])
def test_the_docstring_describes_the_tool_and_its_arguments(function: Callable[..., Any]) -> None:
    documented = tool(function)
    assert documented.schema["function"]["description"] == "Do a thing.\n\nAt some length."
    described = {name: spec["description"] for name, spec in parameters(documented)["properties"].items()}
    assert described == {"a": "The first\nof them.", "b": "The second."}


def test_annotated_description_takes_precedence_over_the_docstring() -> None:
    @tool
    def go(to: Annotated[str, Field(description="From the hint.")], line: Line) -> None:
        """Go.

        Args:
            to: From the docstring.
            line: Which line.
        """

    described = {name: spec["description"] for name, spec in parameters(go)["properties"].items()}
    assert described == {"to": "From the hint.", "line": "Which line."}


def test_docstring_may_be_missing_or_incomplete() -> None:
    @tool
    def bare(a: int) -> None: ...

    @tool
    def stale(a: int) -> None:
        """Do.

        Args:
            gone: Not there any more.
        """

    assert bare.schema["function"]["description"] == ""
    assert parameters(stale)["properties"] == {"a": {"type": "integer"}}
    assert tool(description="Given.")(google).schema["function"]["description"] == "Given."


@pytest.mark.parametrize(
    ("hint", "sent", "got"),
    [
        (int, "5", 5),
        (int, 5.0, 5),
        (float, 5, 5.0),
        (float, "2.5", 2.5),
        (bool, "true", True),
        (str, 42, "42"),
        (str, 1.5, "1.5"),
        (list[int], ["1", 2], [1, 2]),
        (dict[str, float], {"a": "1"}, {"a": 1.0}),
        (int | None, None, None),
        (int | str, "5", "5"),
        (int | str, 5, 5),
        (Literal["a", "b"], "b", "b"),
        (Colour, "blue", Colour.BLUE),
        (Size, 2, Size.LARGE),
        (Point, {"x": "1"}, Point(1, 0)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (datetime.date, "2024-02-29", datetime.date(2024, 2, 29)),
        (Annotated[int, Field(le=5)], 5, 5),
        (Any, {"a": [None]}, {"a": [None]}),
        (str, "\ud800", "\ud800"),
        (str, '{"debug": true}', '{"debug": true}'),
        (str, '"quoted"', '"quoted"'),
        (str | None, "null", "null"),
        (int | None, "null", None),
        (int | None, "None", None),
        (str | None, "None", "None"),
        (int, "1e5", 100_000),
        (bool, "True", True),
        (list[int], "[1, 2]", [1, 2]),
        (list[str | None], "['a', None]", ["a", None]),
        (dict[str, bool], "{'a': True}", {"a": True}),
        (str | list[str], "['a']", "['a']"),
        (dict[str, float], '{"a": 1}', {"a": 1.0}),
        (Point, '{"x": 1}', Point(1, 0)),
        (str | list[str], '["a"]', '["a"]'),
        (Any, "[1]", "[1]"),
        (list[Point], '[{"x": "1"}]', [Point(1, 0)]),
        (Literal["a", 1], "1", 1),
    ],
    ids=str,
)
def test_arguments_are_coerced(hint: Any, sent: object, got: object) -> None:
    def take(value) -> None: ...  # type: ignore[no-untyped-def]

    take.__annotations__["value"] = hint
    checked = tool(take).arguments.check({"value": sent})
    assert checked == {"value": got}
    assert type(checked["value"]) is type(got)


@pytest.mark.parametrize(
    ("hint", "sent", "problem"),
    [
        (int, "five", "'value': input should be a valid integer"),
        (int, 1.5, "'value': input should be a valid integer"),
        (int, None, "'value': input should be a valid integer"),
        (int, True, None),
        (str, ["a"], "'value': input should be a valid string"),
        (bool, "perhaps", "'value': input should be a valid boolean"),
        (list[int], [1, "x"], "'value.1': input should be a valid integer"),
        (Literal["a", "b"], "c", "'value': input should be 'a' or 'b'"),
        (Colour, "green", "'value': input should be 'red' or 'blue'"),
        (Point, {}, "'value.x' is missing"),
        (Point, {"x": 1, "z": 2}, "value.z"),
        (Annotated[int, Field(le=5)], 6, "'value': input should be less than or equal to 5"),
        (list[int], '[1, "x"]', "'value.1': input should be a valid integer"),
        (list[int], "[1, 2", "'value': input should be a valid list"),
        (list[int], "[" * 100_000, "'value': input should be a valid list"),
        (float, "NaN x", "'value': input should be a valid number"),
        (Literal["a", "b"], '"a"', "'value': input should be 'a' or 'b'"),
    ],
    ids=str,
)
def test_invalid_arguments_are_named(hint: Any, sent: object, problem: str | None) -> None:
    def take(value) -> None: ...  # type: ignore[no-untyped-def]

    take.__annotations__["value"] = hint
    checked = tool(take).arguments.check({"value": sent})
    assert (problem in checked) if problem else isinstance(checked, dict)


def test_missing_and_extra_arguments_are_named() -> None:
    search = tool(google)
    assert search.arguments.check({"c": 1}) == (
        "Error: the arguments of 'google' do not fit: 'a' is missing; there is no argument 'c'. "
        "It takes a: integer, b: string (optional)."
    )
    problem = tool(rest).arguments.check({"a": 1, "b" * 10_000: 1})
    assert isinstance(problem, str)
    assert len(problem) < 300


def test_usage_names_choices() -> None:
    @tool
    def choose(a: Literal["x", "y"], b: Colour, c: int | None = None, d: Literal[1] = 1, e: Any = 0) -> None: ...

    assert choose.arguments.usage == (
        'It takes a: one of "x", "y", b: one of "red", "blue", c: integer or null (optional), d: 1 (optional), '
        "e: anything (optional)."
    )
    assert tool(lambda: None).arguments.usage == "It takes no arguments."


def test_keyword_arguments_are_open() -> None:
    @tool
    def anything(a: int, **extra: Any) -> str:
        """Take anything."""
        return f"{a} {extra}"

    assert anything.schema["function"]["parameters"]["additionalProperties"] is True
    assert anything.arguments.check({"a": 1, "b": 2}) == {"a": 1, "b": 2}


def args(*values: int) -> None: ...


def positional(a: int, /) -> None: ...


def opaque(a: object()) -> None: ...  # type: ignore[valid-type]


def unwritable(a: "threading_lock") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def field_as_default(a: int = Field(3, gt=0)) -> None: ...


class Opaque:
    pass


def no_schema(a: Opaque) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (args, r"\*values: int has none"),
        (positional, "passes arguments by name"),
        (opaque, "no JSON schema.*object"),
        (unwritable, "'threading_lock' of 'a' cannot be read"),
        (field_as_default, "write a: Annotated"),
        (no_schema, "no JSON schema.*Opaque"),
    ],
)
def test_signature_without_named_parameters_is_rejected(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"tool '{function.__name__}'.*{message}"):
        _ = tool(function).schema


def test_half_a_surrogate_pair_is_answered_as_a_wrong_value() -> None:
    @tool
    def press(times: int) -> str:
        """Press."""
        return str(times)

    answer = press.arguments.check({"times": "\ud800"})
    assert isinstance(answer, str)
    assert "'times'" in answer


SERVER_SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "depth": {"type": ["integer", "null"]},
        "mode": {"enum": ["r", None]},
        "value": {"description": "Anything."},
        "extra": {"type": "object"},
        "node": {"$ref": "#/$defs/Node"},
        "nodes": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
    },
    "$defs": {"Node": {"type": "object", "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}}}},
}


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"path": None, "unknown": None}, {}),
        (dict.fromkeys(("limit", "depth", "mode", "value")), dict.fromkeys(("limit", "depth", "mode", "value"))),
        ({"extra": {"a": None}, "value": {"b": None}}, {"extra": {"a": None}, "value": {"b": None}}),
        (
            {"node": {"name": "a", "next": {"name": None, "next": None, "other": None}}},
            {"node": {"name": "a", "next": {}}},
        ),
        ({"nodes": [{"name": "a", "next": None}, None]}, {"nodes": [{"name": "a"}, None]}),
        ({"path": "x", "unknown": [None]}, {"path": "x", "unknown": [None]}),
    ],
)
def test_nulls_that_a_schema_does_not_take_are_dropped(arguments: dict[str, Any], kept: dict[str, Any]) -> None:
    assert drop_nulls(arguments, SERVER_SCHEMA) == kept


def test_nulls_of_nested_models_are_dropped() -> None:
    @tool
    def draw(line: Line | None, size: Size = Size.SMALL, **style: Any) -> str:
        """Draw."""
        return "ok"

    schema = draw.schema["function"]["parameters"]
    line = {"start": {"x": 1, "y": None}, "end": {"x": 2, "z": None}, "title": None}
    kept = {"line": {"start": {"x": 1}, "end": {"x": 2}}, "color": None}
    assert drop_nulls({"line": line, "size": None, "color": None}, schema) == kept
    assert drop_nulls({"line": None}, schema) == {"line": None}
