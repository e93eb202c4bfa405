"""Products: immutable, and shared by all sessions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.errors import DataError

_TEXTS = ("asin", "name", "full_description", "category", "query", "product_category")
NO_PRICE = 100.0
"""Price of a product whose row has none, in dollars."""


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
    """URL of a picture; empty if there is none."""

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


def read_product(row: Mapping[str, Any], attributes: Sequence[str]) -> ShopProduct:
    """Read a row of the official file. Raises DataError."""
    try:
        if lacking := [name for name in _TEXTS if not isinstance(row[name], str)]:
            raise TypeError(f"{', '.join(lacking)} must be text")
        features, images = row["small_description"], row.get("images") or [""]
        prices = [float(re.sub(r"[^\d.]", "", price)) for price in (row.get("pricing") or "").split("$")[1:]]
        return ShopProduct(
            asin=row["asin"],
            title=row["name"],
            description=row["full_description"],
            features=tuple(features) if isinstance(features, list) else (features,),
            category=row["category"],
            query=row["query"].lower().strip(),
            product_category=row["product_category"],
            attributes=tuple(attributes),
            options={
                name.lower(): tuple(each["value"].strip().replace("/", " | ").lower() for each in values)
                for name, values in (row["customization_options"] or {}).items()
                if values is not None
            },
            prices=tuple(prices[:2]) or (NO_PRICE,),
            image=images[0] or "",
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"product {row.get('asin', '(without asin)')} cannot be read: {error!r}") from error
