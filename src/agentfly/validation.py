"""Validation by pydantic of dataclass fields and arguments: the type hints, with their constraints, are the checks."""

from __future__ import annotations

import functools
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from agentfly.errors import ConfigError, describe

PositiveInt = Annotated[int, Field(strict=True, ge=1)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0)]
FiniteFloat = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@functools.cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    config = ConfigDict(arbitrary_types_allowed=True)
    hints = get_type_hints(cls, include_extras=True)
    return {name: TypeAdapter(hint, config=config) for name, hint in hints.items()}


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def validate(name: str, value: Any, hint: Any, note: str = "") -> Any:
    """Check and coerce one value. Raises ConfigError: `{name} must be {requirement}{note}, not {value}`."""
    return _validate(name, value, _adapter(hint), note)


def describe_invalid(error: Exception, *, with_input: bool = False) -> str:
    """The first five problems of a value that pydantic has rejected, with their place; the text of any other error."""
    if not isinstance(error, ValidationError):
        return describe(error)
    problems = []
    for each in error.errors(include_url=False, include_context=False)[:5]:
        place = ".".join(map(str, each["loc"]))
        value = f", not {each['input']!r:.40}" if with_input else ""
        problems.append(f"{place or 'all'}: {each['msg']}{value}")
    return "; ".join(problems)


def _validate(name: str, value: Any, adapter: TypeAdapter[Any], note: str) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        problems = []
        for each in error.errors(include_url=False):
            problem = each["msg"].removeprefix("Input should be ").replace("a valid integer", "a whole number")
            if each["type"] == "greater_than_equal":
                minimum = each["ctx"]["ge"]
                problem = f"a {'whole ' if isinstance(minimum, int) else ''}number of at least {minimum:g}"
            problems.append(problem.replace("greater than", "a number above"))
        raise ConfigError(f"{name} must be {' or '.join(dict.fromkeys(problems))}{note}, not {value!r}") from None


def validate_fields(instance: Any, what: str = "") -> None:
    """Check and coerce every field of a dataclass instance; call it in `__post_init__`.

    Raises ConfigError with the field's name, the requirement and the value. `what` precedes the name: "a pool's ".
    """
    for name, adapter in _adapters(type(instance)).items():  # type: ignore[arg-type]  # mypy: type is not Hashable
        value = _validate(f"{what}{name}", getattr(instance, name), adapter, "")
        object.__setattr__(instance, name, value)
