"""Validation of frozen dataclasses by pydantic: the type hints, with their constraints, are the checks."""

from __future__ import annotations

import functools
from typing import Annotated, Any, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from agentfly.errors import ConfigError

PositiveInt = Annotated[int, Field(strict=True, gt=0)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat = Annotated[float, Field(strict=True, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, ge=0)]


@functools.cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    config = ConfigDict(arbitrary_types_allowed=True)
    hints = get_type_hints(cls, include_extras=True)
    return {name: TypeAdapter(hint, config=config) for name, hint in hints.items()}


def validate_fields(instance: Any, what: str = "") -> None:
    """Check and coerce every field of a dataclass instance; call it in `__post_init__`.

    Raises ConfigError with the field's name, the requirement and the value. `what` precedes the name: "a pool's ".
    """
    for name, adapter in _adapters(type(instance)).items():  # type: ignore[arg-type]  # mypy: type is not Hashable
        value = getattr(instance, name)
        try:
            object.__setattr__(instance, name, adapter.validate_python(value))
        except ValidationError as error:
            problems = [each["msg"].removeprefix("Input should be ") for each in error.errors(include_url=False)]
            needed = " or ".join(problems).replace("a valid integer", "a whole number")
            raise ConfigError(f"{what}{name} must be {needed}, not {value!r}") from None
