"""Products, and the shopping goals made from them: an instruction, and the conditions that the score checks.

Products are immutable and shared by all sessions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any, ClassVar

import pydantic

from agentfly.errors import DataError

NO_LIMIT = 1_000_000.0
LIMIT = ", and price lower than"
"""Separates the instruction from its price limit."""


@dataclass(frozen=True, slots=True)
class ShopProduct:
    """A product with the fields that pages, search and score use."""

    asin: str
    """Product number: ten uppercase letters and digits."""
    title: str
    description: str
    features: tuple[str, ...]
    category: str
    """Department, such as `beauty`."""
    query: str
    """Search query for products of its kind."""
    product_category: str
    """Path in the category tree from the root, separated by `›`."""
    attributes: tuple[str, ...]
    """Attributes for the score; not shown on any page."""
    options: Mapping[str, tuple[str, ...]]
    """Option names and their lowercase values."""
    prices: tuple[float, ...]
    """One price, or a minimum and a maximum, in dollars."""
    image: str = ""
    """URL of an image; empty if there is none."""

    @property
    def price_tag(self) -> str:
        """The price as pages show it."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def price(self) -> float:
        """Price for the score; within a range, a fixed draw per product."""
        low, high = self.prices[0], self.prices[-1]
        return low if low == high else Random(f"price of {self.asin}").uniform(low, high)

    @property
    def search_text(self) -> str:
        """The text that the search index contains."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.features[:1], options]).lower()


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
            return _GOAL.validate_python(row)
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'all'}: {e['msg']}" for e in error.errors())
            fields = ", ".join(field.name for field in dataclasses.fields(cls))
            raise DataError(f"a goal has {fields}; this one does not fit: {problems:.500}") from error

    def to_json(self) -> dict[str, Any]:
        """The column `goal` of a task."""
        return {**dataclasses.asdict(self), "attributes": list(self.attributes), "options": list(self.options)}


_GOAL = pydantic.TypeAdapter(ShopGoal)


def make_option_goal(
    product: ShopProduct, wish: str, attributes: Sequence[str], *, chosen: Mapping[str, str]
) -> ShopGoal:
    """A goal for the product with these options; the instruction names them."""
    options = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
    return make_goal(product, f"{wish} with {options}" if options else wish, attributes, options=tuple(chosen.values()))


def make_goal(product: ShopProduct, wish: str, attributes: Sequence[str], *, options: Sequence[str]) -> ShopGoal:
    """A goal with a price limit: the higher of two of the next four multiples of ten, drawn per product."""
    above = [10.0 * step for step in range(1, 100) if 10.0 * step > product.price][:4]
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
