"""WebShop's own products and goals, read from the files that its set-up downloads.

The goals, their order and the splits are WebShop's. What it leaves to chance at every start is fixed here: the limit on
a price, and the price where there is a range.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.data import Source, checked_split, read_json
from agentfly.environments.webshop.goal import Goal, goals_of, limited
from agentfly.environments.webshop.product import Product, read_product
from agentfly.errors import DataError

FILES = {
    "official": ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
    "official/all": ("items_shuffle.json", "items_ins_v2.json"),
}
"""The files of each official shop: its products, and what is known of them."""
HUMAN = "items_human_ins.json"
"""The wishes that people wrote, of all products."""
SPLITS = {"test": slice(0, 500), "validation": slice(500, 1500), "train": slice(1500, None)}
_ORDER = 233
WEBSHOP = Source("WebShop's data", "https://github.com/princeton-nlp/WebShop, whose setup.sh fetches it", "webshop")


@dataclass(frozen=True, slots=True)
class Listed:
    """A product, and the wishes that goals are made of."""

    product: Product
    wish: str
    """Empty where the product has none."""
    wish_attributes: tuple[str, ...]
    human: tuple[Goal, ...]
    """Goals in the words of people."""


def official_tasks(split: str, *, shop: str = "official", human: bool = False) -> list[dict[str, Any]]:
    """The tasks of a split: rows with `question`, `goal`, `shop` and `id`.

    Splits are by goal, as in WebShop: one product may have goals in several of them, a goal is in one. With `human`,
    goals in people's words; else in those of WebShop's rules, one for each combination of a product's options.
    """
    checked_split(split)
    listed = read_products(shop)
    goals = [goal for each in listed for goal in (each.human if human else _ruled(each))]
    Random(_ORDER).shuffle(goals)
    first = {(goal.instruction, goal.asin): number for number, goal in reversed(list(enumerate(goals)))}
    kind = "human" if human else "goal"
    numbers = range(len(goals))[SPLITS[split]]
    return [
        {"id": f"{shop}/{kind}/{number}", "question": goal.instruction, "shop": shop, "goal": goal.to_json()}
        for number, goal in ((number, goals[number]) for number in numbers)
        if first[goal.instruction, goal.asin] == number  # an option listed twice makes the same goal twice
    ]


def _ruled(listed: Listed) -> Iterator[Goal]:
    return goals_of(listed.product, listed.wish, listed.wish_attributes) if listed.wish else iter(())


def read_products(shop: str) -> list[Listed]:
    """The products of an official shop, in their order."""
    if shop not in FILES:
        raise DataError(f"there is no official shop {shop!r}; there are {', '.join(FILES)}")
    return list(_read(shop, WEBSHOP.path()))


@functools.lru_cache(maxsize=2)
def _read(shop: str, folder: Path) -> tuple[Listed, ...]:
    products, known = (read_json(WEBSHOP.file(name)) for name in FILES[shop])
    human = read_json(found) if (found := WEBSHOP.find(HUMAN)) else {}
    if not isinstance(products, list) or not isinstance(known, dict) or not isinstance(human, dict):
        raise DataError(f"{folder} holds other files of these names than WebShop's; they come from {WEBSHOP.address}")
    out: dict[str, Listed] = {}
    for number, row in enumerate(products):
        try:
            asin = row["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in out:
                out[asin] = _listed(row, known.get(asin, {}), human.get(asin) or row.get("instructions") or [])
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"row {number} of {FILES[shop][0]} in {folder} cannot be read: {error!r}") from error
    return tuple(out.values())


def _listed(row: dict[str, Any], known: dict[str, Any], human: list[dict[str, Any]]) -> Listed:
    product = read_product(row, known.get("attributes", ["DUMMY_ATTR"]))
    wishes = tuple(
        limited(product, each["instruction"].strip("."), each["instruction_attributes"], each["instruction_options"])
        for each in human
        if each["instruction_attributes"]
    )
    return Listed(product, known.get("instruction") or "", tuple(known.get("instruction_attributes") or ()), wishes)
