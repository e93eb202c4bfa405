"""A shop that nobody has seen: products drawn from a seed, as many as one likes, and wishes for them.

A product depends on its position and the seed alone, so a larger shop of the same seed begins with the smaller one. Of
ten products one has wishes in the test split only, one in the validation split only; and no wish is in two splits even
where two products would give rise to the same words.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from random import Random
from typing import Any

from agentfly.environments.data import checked_count, checked_split
from agentfly.environments.webshop.goal import Goal, goal_of
from agentfly.environments.webshop.kinds import ProductKind, words
from agentfly.environments.webshop.product import Product
from agentfly.errors import DataError

LARGEST = 1_000_000
"""Most products of a shop."""
PARTS = {"test": (0,), "validation": (1,), "train": (2, 3, 4, 5, 6, 7, 8, 9)}
"""The tenths of products, and of wishes, that each split has."""
_PATIENCE = 2000
"""Draws without a task that was not there already, after which there are hardly more."""
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STRIDE = 62_770_101_935_657
"""Shares no factor with 36**9, so that numbers that follow one another look unrelated and never meet."""


def catalogue(products: int, seed: int) -> Iterator[Product]:
    """So many products, the same for the same seed."""
    return (draw_product(position, seed) for position in range(products))


@functools.lru_cache(maxsize=4096)
def draw_product(position: int, seed: int) -> Product:
    """The product at a position."""
    random = Random(f"product {position} of {seed}")
    kind = random.choice(words().kinds)
    brand, line = _brand(random), random.choice(words().lines)
    attributes = random.sample(kind.attributes, random.randint(3, 5))
    shown = ", ".join(each.title() for each in attributes[:2])
    lowest = random.randint(kind.prices[0] * 100, kind.prices[1] * 100) / 100
    return Product(
        asin=_asin(position, seed),
        title=f"{brand} {line} {kind.noun}, {shown}",
        description=f"The {line} by {brand} is one of our {kind.query}, made with care.",
        features=tuple(_features(kind, attributes, random)),
        category=kind.category,
        query=kind.query,
        product_category=kind.path,
        attributes=tuple(attributes),
        options={name: _some(values, random) for name, values in kind.options.items()},
        prices=(lowest,) if random.random() < 0.7 else (lowest, round(lowest * random.uniform(1.05, 1.3), 2)),
    )


def _asin(position: int, seed: int) -> str:
    number = (position * _STRIDE + int(hashlib.sha256(str(seed).encode()).hexdigest(), 16)) % 36**9
    return "G" + "".join(_DIGITS[number // 36**place % 36] for place in range(8, -1, -1))


def _brand(random: Random) -> str:
    return random.choice(words().starts) + random.choice(words().ends)


def _features(kind: ProductKind, attributes: list[str], random: Random) -> Iterator[str]:
    """One line for each attribute, in any order."""
    for attribute in random.sample(attributes, len(attributes)):
        yield random.choice(words().features).format(attribute=attribute.capitalize(), query=kind.query)


def _some(values: tuple[str, ...], random: Random) -> tuple[str, ...]:
    """A few of the values, in their order."""
    kept = random.sample(values, random.randint(2, min(5, len(values))))
    return tuple(value for value in values if value in kept)


def draw_tasks(split: str, count: int, seed: int, products: int) -> list[dict[str, Any]]:
    """So many different tasks of a split: rows with `question`, `goal`, `shop` and `id`. More begin with fewer."""
    checked_split(split)
    checked_count(count)
    if not 1 <= products <= LARGEST:
        raise DataError(f"a generated shop has 1 to {LARGEST} products, not {products}")
    goals: dict[str, Goal] = {}
    draws, in_vain = _draws(split, products, seed), 0
    while len(goals) < count and in_vain < _PATIENCE:
        goal, before = next(draws), len(goals)
        if goal is not None:
            goals.setdefault(goal.instruction, goal)
        in_vain = in_vain + 1 if len(goals) == before else 0
    if len(goals) < count:
        raise DataError(f"{products} products give rise to {len(goals)} {split} tasks or little more, not {count}")
    shop = f"generated/{products}/{seed}"
    return [
        {"id": f"{shop}/{split}/{number}", "question": question, "shop": shop, "goal": goal.to_json()}
        for number, (question, goal) in enumerate(goals.items())
    ]


def _draws(split: str, products: int, seed: int) -> Iterator[Goal | None]:
    """Wishes without end, many of them more than once; None for each that is not of the split."""
    random, tenths = Random(f"{split} tasks of {seed}"), PARTS[split]
    while True:
        position = random.randrange((products + 9) // 10) * 10 + random.choice(tenths)
        goal = _wish(draw_product(position, seed), random) if position < products else None
        yield goal if goal and hashlib.sha256(goal.instruction.encode()).digest()[0] % 10 in tenths else None


def _wish(product: Product, random: Random) -> Goal:
    wanted = random.sample(product.attributes, random.randint(1, min(3, len(product.attributes))))
    chosen = {name: random.choice(product.options[name]) for name in sorted(product.options)}
    return goal_of(product, f"Find me {', '.join(wanted)} {product.query}", wanted, chosen)
