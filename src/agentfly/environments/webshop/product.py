"""What a shop sells. A product is read once, is shared by everybody, and never changes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agentfly.errors import DataError

_TEXTS = ("asin", "name", "full_description", "category", "query", "product_category")
NO_PRICE = 100.0
"""What a product costs whose row names no price."""


@dataclass(frozen=True, slots=True)
class Product:
    """One product, with the fields that pages, search and score use."""

    asin: str
    """Its number: ten capitals and digits."""
    title: str
    description: str
    features: tuple[str, ...]
    category: str
    """The department, such as `beauty`."""
    query: str
    """What one searches for to get to products of its kind."""
    product_category: str
    """Its place in the tree of categories, from the root, between `›`."""
    attributes: tuple[str, ...]
    """What it is like, for the score; no page shows them."""
    options: Mapping[str, tuple[str, ...]]
    """What can be chosen: a name, and its values in small letters."""
    prices: tuple[float, ...]
    """One price; or the lowest and the highest."""
    image: str = ""
    """Where there is a picture of it; empty: nowhere."""

    @property
    def price_tag(self) -> str:
        """The price as pages show it."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def price(self) -> float:
        """What it costs at the till: of a range, some price within it, always the same."""
        low, high = self.prices[0], self.prices[-1]
        return low if low == high else Random(f"price of {self.asin}").uniform(low, high)

    @property
    def search_text(self) -> str:
        """What search finds it by."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.features[:1], options]).lower()


def read_product(row: Mapping[str, Any], attributes: Sequence[str]) -> Product:
    """A product from a row of the official file."""
    try:
        if lacking := [name for name in _TEXTS if not isinstance(row[name], str)]:
            raise TypeError(f"{', '.join(lacking)} must be text")
        features, images = row["small_description"], row.get("images") or [""]
        return Product(
            asin=row["asin"],
            title=row["name"],
            description=row["full_description"],
            features=tuple(features) if isinstance(features, list) else (features,),
            category=row["category"],
            query=row["query"].lower().strip(),
            product_category=row["product_category"],
            attributes=tuple(attributes),
            options=_options(row["customization_options"] or {}),
            prices=_prices(row.get("pricing") or ""),
            image=images[0] or "",
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"product {row.get('asin', '(without asin)')} cannot be read: {error!r}") from error


def _options(given: Mapping[str, Sequence[Mapping[str, Any]] | None]) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(each["value"].strip().replace("/", " | ").lower() for each in values)
        for name, values in given.items()
        if values is not None
    }


def _prices(written: str) -> tuple[float, ...]:
    found = [float(re.sub(r"[^\d.]", "", price)) for price in written.split("$")[1:]]
    return tuple(found[:2]) or (NO_PRICE,)
