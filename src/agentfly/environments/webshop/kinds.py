"""The kinds of products that a generated shop sells, and the words they are made of; the words are in `kinds.toml`."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class ProductKind:
    """What products of one kind have in common."""

    category: str
    path: str
    """Its place in the tree of categories."""
    query: str
    """What such products are called in the plural; also what one searches for."""
    noun: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[int, int]
    """The lowest and the highest, in dollars."""


@dataclass(frozen=True, slots=True)
class Words:
    """All that products are drawn from."""

    kinds: tuple[ProductKind, ...]
    starts: tuple[str, ...]
    """A brand is one of these and one of the `ends`."""
    ends: tuple[str, ...]
    lines: tuple[str, ...]
    """What the products of a brand are called."""
    features: tuple[str, ...]
    """Sentences about an `{attribute}` of the products that one gets by a `{query}`."""


@functools.cache
def words() -> Words:
    """The words, read once."""
    table = tomllib.loads(resources.files(__package__).joinpath("kinds.toml").read_text("utf-8"))
    kinds = tuple(_kind(row, table["values"], table["attributes"]) for row in table["kind"])
    return Words(kinds, **{name: tuple(listed) for name, listed in table["brands"].items()})


def _kind(row: dict[str, Any], values: Mapping[str, list[str]], shared: Mapping[str, list[str]]) -> ProductKind:
    options = {name: tuple(values[of] if isinstance(of, str) else of) for name, of in row["options"].items()}
    attributes = (*shared.get(row.get("shared", ""), ()), *row.get("attributes", ()))
    named = {name: row[name] for name in ("category", "path", "query", "noun")}
    return ProductKind(**named, attributes=attributes, options=options, prices=tuple(row["prices"]))
