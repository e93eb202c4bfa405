"""Shopping goals: an instruction, and the conditions that the score checks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, ClassVar

import pydantic

from agentfly.environments.webshop.product import ShopProduct
from agentfly.errors import DataError

NO_LIMIT = 1_000_000.0
LIMIT = ", and price lower than"
"""Separates the instruction from its price limit."""
_LIMITS = [10.0 * step for step in range(1, 100)]


@dataclass(frozen=True, slots=True)
class ShopGoal:
    """A goal made from one product; other products may satisfy it too."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = {"extra": "forbid"}

    asin: str
    """The product it was made from."""
    name: str
    """Title of that product."""
    query: str
    product_category: str
    instruction: str
    attributes: Annotated[tuple[str, ...], pydantic.Field(min_length=1)]
    """Wanted attributes; at least one."""
    options: tuple[str, ...]
    """Wanted option values."""
    price_upper: Annotated[float, pydantic.Strict()]
    """Maximum price, in dollars."""

    @classmethod
    def from_json(cls, row: object) -> ShopGoal:
        """Read the column `goal` of a task. Raises DataError."""
        try:
            return _goal_adapter().validate_python(row)
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'all'}: {e['msg']}" for e in error.errors())
            fields = ", ".join(field.name for field in dataclasses.fields(cls))
            raise DataError(f"a goal has {fields}; this one does not fit: {problems:.500}") from error

    def to_json(self) -> dict[str, Any]:
        """The column `goal` of a task."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**row, "attributes": list(self.attributes), "options": list(self.options)}


@functools.cache
def _goal_adapter() -> pydantic.TypeAdapter[ShopGoal]:
    return pydantic.TypeAdapter(ShopGoal)


def enumerate_goals(product: ShopProduct, wish: str, attributes: Sequence[str]) -> Iterator[ShopGoal]:
    """One goal per combination of the product's options, with option names in alphabetical order."""
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        yield make_option_goal(product, wish, attributes, chosen=dict(zip(names, values, strict=True)))


def make_option_goal(
    product: ShopProduct, wish: str, attributes: Sequence[str], *, chosen: Mapping[str, str]
) -> ShopGoal:
    """A goal for the product with these options; the instruction names them."""
    options = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
    return make_goal(product, f"{wish} with {options}" if options else wish, attributes, options=tuple(chosen.values()))


def make_goal(product: ShopProduct, wish: str, attributes: Sequence[str], *, options: Sequence[str]) -> ShopGoal:
    """A goal with a price limit: the higher of two of the next four multiples of ten, drawn per product."""
    above = [limit for limit in _LIMITS if limit > product.price][:4]
    price_upper, suffix = NO_LIMIT, ""
    if len(above) >= 2:
        price_upper = max(Random(f"limit of {product.asin}").sample(above, 2))
        suffix = f"{LIMIT} {price_upper:.2f} dollars"
    return ShopGoal(
        asin=product.asin,
        name=product.title,
        query=product.query,
        product_category=product.product_category,
        instruction=wish + suffix,
        attributes=tuple(attributes),
        options=tuple(options),
        price_upper=price_upper,
    )
