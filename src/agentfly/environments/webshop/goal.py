"""What somebody wants to buy, in words and as the score checks it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.environments.webshop.product import Product
from agentfly.errors import DataError

NO_LIMIT = 1_000_000.0
LIMIT = ", and price lower than"
"""What stands between a wish and its limit."""
_LIMITS = [10.0 * step for step in range(1, 100)]


@dataclass(frozen=True, slots=True)
class Goal:
    """One wish. It was made of a product, and other products may grant it as well."""

    asin: str
    """The product it was made of."""
    name: str
    """That product's title."""
    query: str
    product_category: str
    instruction: str
    """The wish in words."""
    attributes: tuple[str, ...]
    """What the product should be like; at least one."""
    options: tuple[str, ...]
    """Values that should be chosen."""
    price_upper: float
    """The most that it may cost."""

    @classmethod
    def of(cls, row: object) -> Goal:
        """Read the column `goal` of a task."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(row, Mapping) or set(row) != names:
            has = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"{row!r:.60}"
            raise DataError(f"a goal has {', '.join(sorted(names))}; this one has {has or 'nothing'}")
        texts = {name: row[name] for name in ("asin", "name", "query", "product_category", "instruction")}
        lists, price = [row["attributes"], row["options"]], row["price_upper"]
        well = all(isinstance(text, str) for text in texts.values()) and isinstance(price, int | float)
        if not well or not all(map(_is_texts, lists)) or not row["attributes"]:
            raise DataError("a goal's attributes and options are lists of texts, price_upper a number, the rest texts")
        attributes, options = map(tuple, lists)
        return cls(**texts, attributes=attributes, options=options, price_upper=float(price))

    def to_json(self) -> dict[str, Any]:
        """The column `goal` of a task."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**row, "attributes": list(self.attributes), "options": list(self.options)}


def _is_texts(given: object) -> bool:
    return isinstance(given, list | tuple) and all(isinstance(each, str) for each in given)


def goals_of(product: Product, wish: str, attributes: Sequence[str]) -> Iterator[Goal]:
    """A goal for every combination of the product's options."""
    for chosen in combinations(product):
        yield goal_of(product, wish, attributes, chosen)


def combinations(product: Product) -> Iterator[dict[str, str]]:
    """Every way to choose the product's options, by name in alphabetical order."""
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def goal_of(product: Product, wish: str, attributes: Sequence[str], chosen: Mapping[str, str]) -> Goal:
    """The goal to have the product with these options, and for less than a limit somewhat above its price."""
    options = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
    return limited(product, f"{wish} with {options}" if options else wish, attributes, tuple(chosen.values()))


def limited(product: Product, wish: str, attributes: Sequence[str], options: Sequence[str]) -> Goal:
    """The goal, with a limit on the price: of the next four full tens, the higher of two; the same for each wish."""
    price = product.price
    above = [limit for limit in _LIMITS if limit > price][:4]
    price_upper, words = NO_LIMIT, ""
    if len(above) >= 2:
        price_upper = max(Random(f"limit of {product.asin}").sample(above, 2))
        words = f"{LIMIT} {price_upper:.2f} dollars"
    return Goal(
        asin=product.asin,
        name=product.title,
        query=product.query,
        product_category=product.product_category,
        instruction=wish + words,
        attributes=tuple(attributes),
        options=tuple(options),
        price_upper=price_upper,
    )
