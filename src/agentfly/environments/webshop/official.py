"""WebShop's own products and goals, read from the files that its set-up downloads.

Goals, their order and the splits are WebShop's. What WebShop draws randomly at every start is fixed here: price limits,
and prices within a range.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.data import DatasetSource, read_json, validate_split
from agentfly.environments.webshop.product import ShopGoal, ShopProduct, make_goal, make_option_goal
from agentfly.errors import DataError

FILES = {
    "official": ("items_shuffle_1000.json", "items_ins_v2_1000.json"),
    "official/all": ("items_shuffle.json", "items_ins_v2.json"),
}
"""By shop: the files with its products, and with their attributes and instructions."""
HUMAN = "items_human_ins.json"
"""Instructions written by people, for all products."""
SPLITS = {"test": slice(0, 500), "validation": slice(500, 1500), "train": slice(1500, None)}
_SHUFFLE_SEED = 233
_TEXTS = ("asin", "name", "full_description", "category", "query", "product_category")
NO_PRICE = 100.0
"""Price of a product whose row has none, in dollars."""
WEBSHOP = DatasetSource(
    "WebShop's data", "https://github.com/princeton-nlp/WebShop, whose setup.sh fetches it", "webshop"
)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A product and what its goals are made from."""

    product: ShopProduct
    wish: str
    """Generated instruction; empty if the product has none."""
    wish_attributes: tuple[str, ...]
    human: tuple[ShopGoal, ...]
    """Goals with instructions written by people."""


def official_tasks(split: str, *, shop: str = "official", human: bool = False) -> list[dict[str, Any]]:
    """The tasks of a split: rows with `question`, `goal`, `shop` and `id`.

    As in WebShop, splits are by goal: a product may have goals in several splits. human: instructions written by people
    instead of WebShop's generated ones, which cover each combination of a product's options.
    """
    validate_split(split)
    goals: list[ShopGoal] = []
    for entry in read_catalog(shop):
        if human:
            goals += entry.human
        elif entry.wish:
            # One goal per combination of the product's options, with option names in alphabetical order.
            names = sorted(entry.product.options)
            for values in itertools.product(*(entry.product.options[name] for name in names)):
                chosen = dict(zip(names, values, strict=True))
                goals.append(make_option_goal(entry.product, entry.wish, entry.wish_attributes, chosen=chosen))
    Random(_SHUFFLE_SEED).shuffle(goals)
    # A product that lists an option twice yields the same goal twice: keep the first.
    first = {(goal.instruction, goal.asin): number for number, goal in reversed(list(enumerate(goals)))}
    kind = "human" if human else "goal"
    numbers = range(len(goals))[SPLITS[split]]
    return [
        {"id": f"{shop}/{kind}/{number}", "question": goal.instruction, "shop": shop, "goal": goal.to_json()}
        for number, goal in ((number, goals[number]) for number in numbers)
        if first[goal.instruction, goal.asin] == number
    ]


def read_catalog(shop: str) -> tuple[CatalogEntry, ...]:
    """The products of an official shop, in file order."""
    if shop not in FILES:
        raise DataError(f"there is no official shop {shop!r}; there are {', '.join(FILES)}")
    return _read_files(shop, WEBSHOP.path())


@functools.lru_cache(maxsize=2)
def _read_files(shop: str, folder: Path) -> tuple[CatalogEntry, ...]:
    products, known = (read_json(WEBSHOP.file(name)) for name in FILES[shop])
    human = read_json(found) if (found := WEBSHOP.find(HUMAN)) else {}
    if not isinstance(products, list) or not isinstance(known, dict) or not isinstance(human, dict):
        raise DataError(f"the files in {folder} are not WebShop's; get them from {WEBSHOP.address}")
    entries: dict[str, CatalogEntry] = {}
    for number, row in enumerate(products):
        try:
            asin = row["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in entries:
                about = known.get(asin, {})
                product = read_product(row, about.get("attributes", ["DUMMY_ATTR"]))
                entries[asin] = CatalogEntry(
                    product=product,
                    wish=about.get("instruction") or "",
                    wish_attributes=tuple(about.get("instruction_attributes") or ()),
                    human=tuple(
                        make_goal(
                            product,
                            each["instruction"].strip("."),
                            each["instruction_attributes"],
                            options=each["instruction_options"],
                        )
                        for each in human.get(asin) or row.get("instructions") or []
                        if each["instruction_attributes"]
                    ),
                )
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"row {number} of {FILES[shop][0]} in {folder} cannot be read: {error!r}") from error
    return tuple(entries.values())


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
