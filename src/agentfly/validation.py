"""Validation by pydantic of dataclass fields and arguments: the type hints, with their constraints, are the checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Annotated, Any, ParamSpec, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError, PydanticUndefined

from agentfly.errors import ConfigError, describe

PositiveInt = Annotated[int, Field(strict=True, ge=1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0)]
FiniteFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]


_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(Field, field))
def record(*, kw_only: bool = False, frozen: bool = True, prefix: str = "") -> Callable[[type[_T]], type[_T]]:
    """A dataclass that pydantic validates; `Field(default, ge=…)` declares the bounds of a field.

    Raises ConfigError: `{prefix}{field} must be {requirement}, not {value}`. `__post_init__` runs after the fields.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        # pydantic takes True for 1: `steps=true` would train one step.
        cls._refuse_bool = field_validator("*", mode="before")(classmethod(_refuse_bool))  # type: ignore[attr-defined]
        config = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid")
        decorated = pydantic_dataclass(cls, frozen=frozen, kw_only=kw_only, config=config)
        for info in fields(decorated):
            if isinstance(info.default, FieldInfo):
                # A plain dataclass that extends this one would take the declaration for the default.
                default = info.default.default
                info.default = MISSING if default is PydanticUndefined else default
        initialize = decorated.__init__

        @functools.wraps(initialize)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                initialize(self, *args, **kwargs)
            except ValidationError as error:
                first, *_ = errors = error.errors(include_url=False)
                location = first["loc"][:1]
                if first["type"] == "unexpected_keyword_argument":
                    raise ConfigError(f"{cls.__name__} has no field {location[0]!r}") from None
                problems = dict.fromkeys(
                    _describe_problem(problem) for problem in errors if problem["loc"][:1] == location
                )
                name = next(iter(location), "")
                if isinstance(name, int):  # an argument by position
                    name = list(decorated.__pydantic_fields__)[name]
                text = f"{prefix}{name} must be {' or '.join(problems)}, not {first['input']!r:.60}"
                raise ConfigError(text) from None

        decorated.__init__ = init  # type: ignore[method-assign]
        return decorated  # type: ignore[return-value]

    return decorate


def _refuse_bool(cls: Any, value: Any, info: ValidationInfo) -> Any:
    hint = cls.__pydantic_fields__[info.field_name].annotation
    types = {hint, *get_args(hint)}
    if isinstance(value, bool) and types & {int, float} and bool not in types:
        raise PydanticCustomError("bool_as_number", "a number")
    return value


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def validate(name: str, value: Any, hint: Any, note: str = "") -> Any:
    """Check and coerce one value. Raises ConfigError: `{name} must be {requirement}{note}, not {value}`."""
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        problems = dict.fromkeys(map(_describe_problem, error.errors(include_url=False)))
        raise ConfigError(f"{name} must be {' or '.join(problems)}{note}, not {value!r}") from None


def validate_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Check the arguments whose hints declare bounds, such as `max_rows: PositiveInt | None`. Raises ConfigError."""
    names = tuple(inspect.signature(function).parameters)
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not hints:  # at the first call: the hints may name classes that are defined below the function
            hints.update(get_type_hints(function, include_extras=True))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            hint = hints.get(name)
            if any(get_origin(option) is Annotated for option in (hint, *get_args(hint))):
                validate(name, value, hint, ", or None" if type(None) in get_args(hint) else "")
        return function(*args, **kwargs)

    return call


def describe_invalid(error: Exception, *, with_input: bool = False) -> str:
    """The first five problems of a value that pydantic has rejected, with their place; the text of any other error."""
    if not isinstance(error, ValidationError):
        return describe(error)
    problems = []
    for problem in error.errors(include_url=False, include_context=False)[:5]:
        field = ".".join(map(str, problem["loc"]))
        value = f", not {problem['input']!r:.40}" if with_input else ""
        problems.append(f"{field or 'all'}: {problem['msg']}{value}")
    return "; ".join(problems)


_PARSED = {
    **dict.fromkeys(("int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_parsing", "float_type", "bool_as_number"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    "string_too_short": "text that is not empty",
    "tuple_type": "a list",
}
"""Requirements that pydantic's messages mix with what it tried, by the type of the error."""


def _describe_problem(error: ErrorDetails) -> str:
    """What a value has to be, as it follows on "must be"."""
    if error["type"] == "greater_than_equal":
        minimum = error["ctx"]["ge"]
        return f"a {'whole ' if isinstance(minimum, int) else ''}number of at least {minimum:g}"
    if error["type"] in _PARSED:
        return _PARSED[error["type"]]
    problem = error["msg"].removeprefix("Input should be ").replace("a valid integer", "a whole number")
    return problem.replace("less than or equal to", "at most").replace("greater than", "a number above")
