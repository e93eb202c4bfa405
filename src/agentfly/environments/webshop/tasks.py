"""Catalogs and tasks: WebShop's own, read from the files that its set-up downloads, and generated ones.

Official goals, their order and the splits are WebShop's. What WebShop draws randomly at every start is fixed here:
price limits, and prices within a range.

A generated product depends on its position and the seed alone, so a larger shop of the same seed starts with the
smaller one. The splits are disjoint in products (by tenths of the positions) and in instructions (by a hash).
`kinds.toml` has the vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from agentfly.environments.data import DatasetSource, load_toml, read_json, validate_count, validate_split
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
MAX_PRODUCTS = 1_000_000
SPLIT_TENTHS = {"test": (0,), "validation": (1,), "train": (2, 3, 4, 5, 6, 7, 8, 9)}
"""By split: its tenths of the products and of the instructions."""
_MAX_REJECTED = 2000
"""Draws in a row without a new task after which the shop counts as exhausted."""
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STRIDE = 62_770_101_935_657
"""Coprime to 36**9, so that consecutive positions get unrelated and unique product numbers."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A product and what its goals are made from."""

    product: ShopProduct
    instruction: str
    """Generated instruction. Empty if the product has none."""
    instruction_attributes: tuple[str, ...]
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
        elif entry.instruction:
            # One goal per combination of the product's options, with option names in alphabetical order.
            product, instruction, attributes = entry.product, entry.instruction, entry.instruction_attributes
            names = sorted(product.options)
            for values in itertools.product(*(product.options[name] for name in names)):
                chosen = dict(zip(names, values, strict=True))
                goals.append(make_option_goal(product, instruction, attributes, chosen=chosen))
    Random(_SHUFFLE_SEED).shuffle(goals)
    # A product that lists an option twice yields the same goal twice: keep the first.
    first = {(goal.instruction, goal.asin): number for number, goal in reversed(list(enumerate(goals)))}
    kind = "human" if human else "goal"
    numbers = range(len(goals))[SPLITS[split]]
    return [
        {"id": f"{shop}/{kind}/{number}", "question": goal.instruction, "shop": shop, "goal": goal.to_json()}
        for number, goal in enumerate(goals)
        if number in numbers and first[goal.instruction, goal.asin] == number
    ]


def read_catalog(shop: str) -> tuple[CatalogEntry, ...]:
    """The products of an official shop, in file order."""
    if shop not in FILES:
        raise DataError(f"there is no official shop {shop!r}; there are {', '.join(FILES)}")
    return _read_files(shop, WEBSHOP.path())


@functools.lru_cache(maxsize=2)
def _read_files(shop: str, folder: Path) -> tuple[CatalogEntry, ...]:
    products, described = (read_json(WEBSHOP.file(name)) for name in FILES[shop])
    human = read_json(path) if (path := WEBSHOP.find(HUMAN)) else {}
    if not isinstance(products, list) or not isinstance(described, dict) or not isinstance(human, dict):
        raise DataError(f"the files in {folder} are not WebShop's; get them from {WEBSHOP.address}")
    entries: dict[str, CatalogEntry] = {}
    for number, row in enumerate(products):
        try:
            asin = row["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in entries:
                about = described.get(asin, {})
                product = read_product(row, about.get("attributes", ["DUMMY_ATTR"]))
                goals = []
                for instruction_row in human.get(asin) or row.get("instructions") or []:
                    if attributes := instruction_row["instruction_attributes"]:
                        instruction, options = (
                            instruction_row["instruction"].strip("."),
                            instruction_row["instruction_options"],
                        )
                        goals.append(make_goal(product, instruction, attributes, options=options))
                entries[asin] = CatalogEntry(
                    product=product,
                    instruction=about.get("instruction") or "",
                    instruction_attributes=tuple(about.get("instruction_attributes") or ()),
                    human=tuple(goals),
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
                name.lower(): tuple(option["value"].strip().replace("/", " | ").lower() for option in values)
                for name, values in (row["customization_options"] or {}).items()
                if values is not None
            },
            prices=tuple(prices[:2]) or (NO_PRICE,),
            image=images[0] or "",
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"product {row.get('asin', '(without asin)')} cannot be read: {error!r}") from error


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


@functools.cache
def load_kinds() -> tuple[ProductKind, ...]:
    """Read the kinds of products in `kinds.toml`."""
    table = load_toml(__package__, "kinds.toml")
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
    return tuple(kinds)


def generate_catalog(products: int, seed: int) -> Iterator[ShopProduct]:
    """The first `products` products of a seed."""
    return (draw_product(position, seed) for position in range(products))


@functools.lru_cache(maxsize=4096)
def draw_product(position: int, seed: int) -> ShopProduct:
    """The product at a position."""
    random = Random(f"product {position} of {seed}")
    words = load_toml(__package__, "kinds.toml")["brands"]
    kind = random.choice(load_kinds())
    brand = random.choice(words["starts"]) + random.choice(words["ends"])
    line = random.choice(words["lines"])
    attributes = random.sample(kind.attributes, random.randint(3, 5))
    lowest = random.randint(kind.prices[0] * 100, kind.prices[1] * 100) / 100
    features = tuple(
        random.choice(words["features"]).format(attribute=attribute.capitalize(), query=kind.query)
        for attribute in random.sample(attributes, len(attributes))
    )
    options = {}
    for name, values in kind.options.items():
        chosen = random.sample(values, random.randint(2, min(5, len(values))))
        options[name] = tuple(value for value in values if value in chosen)
    number = (position * _STRIDE + int(hashlib.sha256(str(seed).encode()).hexdigest(), 16)) % 36**9
    return ShopProduct(
        asin="G" + "".join(_DIGITS[number // 36**exponent % 36] for exponent in range(8, -1, -1)),
        title=f"{brand} {line} {kind.noun}, {', '.join(attribute.title() for attribute in attributes[:2])}",
        description=f"The {line} by {brand} is one of our {kind.query}, made with care.",
        features=features,
        category=kind.category,
        query=kind.query,
        product_category=kind.path,
        attributes=tuple(attributes),
        options=options,
        prices=(lowest,) if random.random() < 0.7 else (lowest, round(lowest * random.uniform(1.05, 1.3), 2)),
    )


def draw_tasks(split: str = "train", count: int = 100, *, seed: int = 0, products: int = 1000) -> list[dict[str, Any]]:
    """Different tasks in a generated shop with this number of `products`; tasks of the same seed share the shop.

    Rows have `question`, `goal`, `shop` and `id`.
    """
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
        attributes = random.sample(product.attributes, random.randint(1, min(3, len(product.attributes))))
        chosen = {name: random.choice(product.options[name]) for name in sorted(product.options)}
        goal = make_option_goal(product, f"Find me {', '.join(attributes)} {product.query}", attributes, chosen=chosen)
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
