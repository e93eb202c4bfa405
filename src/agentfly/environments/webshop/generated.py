"""A generated shop: products drawn from a seed, and goals for them.

A product depends on its position and the seed alone, so a larger shop of the same seed starts with the smaller one. The
splits are disjoint in products (by tenths of the positions) and in instructions (by a hash). `kinds.toml` has the
vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Any

from agentfly.environments.data import validate_count, validate_split
from agentfly.environments.webshop.product import ShopGoal, ShopProduct, make_option_goal
from agentfly.errors import DataError

MAX_PRODUCTS = 1_000_000
SPLIT_TENTHS = {"test": (0,), "validation": (1,), "train": (2, 3, 4, 5, 6, 7, 8, 9)}
"""By split: its tenths of the products and of the instructions."""
_MAX_REJECTED = 2000
"""Draws in a row without a new task after which the shop counts as exhausted."""
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STRIDE = 62_770_101_935_657
"""Coprime to 36**9, so that consecutive positions get unrelated and unique product numbers."""


@dataclass(frozen=True, slots=True)
class ProductKind:
    """What products of one kind have in common."""

    category: str
    path: str
    """Path in the category tree."""
    query: str
    """Plural name of such products; also the search query."""
    noun: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[int, int]
    """Minimum and maximum, in dollars."""


@dataclass(frozen=True, slots=True)
class ProductVocabulary:
    """What products are drawn from."""

    kinds: tuple[ProductKind, ...]
    starts: tuple[str, ...]
    """First halves of brand names."""
    ends: tuple[str, ...]
    """Second halves of brand names."""
    lines: tuple[str, ...]
    """Names of product lines."""
    features: tuple[str, ...]
    """Sentence templates with `{attribute}` and `{query}`."""


@functools.cache
def load_vocabulary() -> ProductVocabulary:
    """Read `kinds.toml`."""
    table = tomllib.loads(resources.files(__package__).joinpath("kinds.toml").read_text("utf-8"))
    kinds = []
    for row in table["kind"]:
        # An option names a list in [values], or has its own; `shared` names a list in [attributes].
        options = {
            name: tuple(table["values"][values] if isinstance(values, str) else values)
            for name, values in row["options"].items()
        }
        attributes = (*table["attributes"].get(row.get("shared", ""), ()), *row.get("attributes", ()))
        named = {name: row[name] for name in ("category", "path", "query", "noun")}
        kinds.append(ProductKind(**named, attributes=attributes, options=options, prices=tuple(row["prices"])))
    return ProductVocabulary(tuple(kinds), **{name: tuple(listed) for name, listed in table["brands"].items()})


def generate_catalog(products: int, seed: int) -> Iterator[ShopProduct]:
    """The first `products` products of a seed."""
    return (draw_product(position, seed) for position in range(products))


@functools.lru_cache(maxsize=4096)
def draw_product(position: int, seed: int) -> ShopProduct:
    """The product at a position."""
    random = Random(f"product {position} of {seed}")
    vocabulary = load_vocabulary()
    kind = random.choice(vocabulary.kinds)
    brand = random.choice(vocabulary.starts) + random.choice(vocabulary.ends)
    line = random.choice(vocabulary.lines)
    attributes = random.sample(kind.attributes, random.randint(3, 5))
    lowest = random.randint(kind.prices[0] * 100, kind.prices[1] * 100) / 100
    features = tuple(
        random.choice(vocabulary.features).format(attribute=attribute.capitalize(), query=kind.query)
        for attribute in random.sample(attributes, len(attributes))
    )
    options = {}
    for name, values in kind.options.items():
        chosen = random.sample(values, random.randint(2, min(5, len(values))))
        options[name] = tuple(value for value in values if value in chosen)
    number = (position * _STRIDE + int(hashlib.sha256(str(seed).encode()).hexdigest(), 16)) % 36**9
    return ShopProduct(
        asin="G" + "".join(_DIGITS[number // 36**place % 36] for place in range(8, -1, -1)),
        title=f"{brand} {line} {kind.noun}, {', '.join(each.title() for each in attributes[:2])}",
        description=f"The {line} by {brand} is one of our {kind.query}, made with care.",
        features=features,
        category=kind.category,
        query=kind.query,
        product_category=kind.path,
        attributes=tuple(attributes),
        options=options,
        prices=(lowest,) if random.random() < 0.7 else (lowest, round(lowest * random.uniform(1.05, 1.3), 2)),
    )


def draw_tasks(split: str, count: int, seed: int, products: int) -> list[dict[str, Any]]:
    """`count` different tasks of a split: rows with `question`, `goal`, `shop` and `id`. Prefixes are stable."""
    validate_split(split)
    validate_count(count)
    if not 1 <= products <= MAX_PRODUCTS:
        raise DataError(f"a generated shop has 1 to {MAX_PRODUCTS} products, not {products}")
    random = Random(f"{split} tasks of {seed}")
    tenths = SPLIT_TENTHS[split]
    goals: dict[str, ShopGoal] = {}
    rejected = 0
    while len(goals) < count and rejected < _MAX_REJECTED:
        rejected += 1
        position = random.randrange((products + 9) // 10) * 10 + random.choice(tenths)
        if position >= products:
            continue
        product = draw_product(position, seed)
        wanted = random.sample(product.attributes, random.randint(1, min(3, len(product.attributes))))
        chosen = {name: random.choice(product.options[name]) for name in sorted(product.options)}
        goal = make_option_goal(product, f"Find me {', '.join(wanted)} {product.query}", wanted, chosen=chosen)
        in_split = hashlib.sha256(goal.instruction.encode()).digest()[0] % 10 in tenths
        if in_split and goal.instruction not in goals:
            goals[goal.instruction] = goal
            rejected = 0
    if len(goals) < count:
        raise DataError(f"{products} products yield about {len(goals)} {split} tasks, not {count}")
    shop = f"generated/{products}/{seed}"
    return [
        {"id": f"{shop}/{split}/{number}", "question": question, "shop": shop, "goal": goal.to_json()}
        for number, (question, goal) in enumerate(goals.items())
    ]
