"""Products, and the shopping goals made from them: an instruction, and the conditions that the score checks.

Products are immutable and shared by all sessions. The score of a purchase is `type × (attributes + options + price) /
n`, as WebShop defines it, with two differences. WebShop takes the nouns of a title from spaCy's large English model;
here a lexicon-based tagger finds them without a download, with rules that bring it close to WebShop's recorded runs.
And a score never exceeds 1, which in WebShop it can by options that were not asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Annotated, Any, ClassVar, cast

import pydantic

from agentfly.errors import DataError, require_extra
from agentfly.validation import describe_invalid

NO_LIMIT = 1_000_000.0
LIMIT = ", and price lower than"
"""Separates the instruction from its price limit."""
_MIN_SIMILARITY = 85
"""Of 100. Above it, two phrases count as equal."""
_COLORS = tuple((resources.files(__package__) / "colors.txt").read_text(encoding="utf-8").split())
"""A value that contains one of these counts as the first one it contains."""
_NOT_ASCII = dict.fromkeys(range(128, 256))
_INNER_HYPHEN = re.compile(r"(?<=[^\W\d])[-/](?=[^\W\d])")
_NOT_NOUNS = frozenset({"plus"})
_tagger_lock = threading.Lock()


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
    """URL of an image. Empty if there is none."""

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
            fields = ", ".join(field.name for field in dataclasses.fields(cls))
            raise DataError(
                f"a goal has {fields}; this one does not fit: {describe_invalid(error, with_input=True)}"
            ) from error

    def to_json(self) -> dict[str, Any]:
        """The column `goal` of a task."""
        row: dict[str, Any] = _GOAL.dump_python(self, mode="json")
        return row


_GOAL = pydantic.TypeAdapter(ShopGoal)


def make_option_goal(
    product: ShopProduct, instruction: str, attributes: Sequence[str], *, chosen: Mapping[str, str]
) -> ShopGoal:
    """A goal for the product with these options; the instruction names them."""
    options = ", and ".join(f"{name}: {value}" for name, value in chosen.items())
    return make_goal(
        product, f"{instruction} with {options}" if options else instruction, attributes, options=tuple(chosen.values())
    )


def make_goal(product: ShopProduct, instruction: str, attributes: Sequence[str], *, options: Sequence[str]) -> ShopGoal:
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
        instruction=instruction + suffix,
        attributes=tuple(attributes),
        options=tuple(options),
        price_upper=price_upper,
    )


@dataclass(frozen=True, slots=True)
class ShopScore:
    """The score of a purchase and its parts."""

    reward: float
    type: float
    """1, 0.5, 0.1 or 0: whether it is the kind of product that was asked for."""
    attributes: float
    """Fraction of the wanted attributes that the product has."""
    options: float
    """Chosen wanted options over wanted options. 1 if none is wanted."""
    price: float
    """1 if it is within the price limit, else 0."""


def score_purchase(product: ShopProduct, goal: ShopGoal, chosen: Mapping[str, str]) -> ShopScore:
    """Score the purchase of a product with the chosen options."""
    texts = (product.title.lower(), " ".join(product.features).lower(), product.description.lower())

    def is_on_page(phrase: str) -> bool:
        return any(phrase in text for text in texts)

    attributes = sum(
        _is_similar(attribute, product.attributes) or is_on_page(attribute) for attribute in goal.attributes
    )
    colors = [_normalize_color(option) for option in goal.options]
    options = 0
    for name, value in chosen.items():
        color = _normalize_color(value)
        matches = color in colors if name.lower() == "size" else _is_similar(color, colors)
        options += matches or is_on_page(color)
    price = float(product.price <= goal.price_upper)
    kind = _score_type(product, goal)
    conditions = len(goal.attributes) + len(goal.options) + 1
    return ShopScore(
        reward=min(1.0, kind * (attributes + options + price) / conditions),
        type=kind,
        attributes=attributes / len(goal.attributes),
        options=options / len(goal.options) if goal.options else 1.0,
        price=price,
    )


def _score_type(product: ShopProduct, goal: ShopGoal) -> float:
    """1, 0.5, 0.1 or 0, by shared nouns of the titles, the query and shared categories."""
    goal_nouns = extract_nouns(goal.name)
    shared = len({*extract_nouns(product.title)} & {*goal_nouns}) / len(goal_nouns) if goal_nouns else 0.2
    if shared < 0.1:
        return 0.1 if shared else 0.0
    paths = (item.product_category.split("›") for item in (product, goal))
    common = set.intersection(*({name.strip() for name in path} for path in paths))
    return 1.0 if product.query == goal.query or len(common) >= 2 or shared > 0.2 else 0.5


def _normalize_color(value: str) -> str:
    return next((color for color in _COLORS if color in value), value)


def _is_similar(phrase: str, phrases: Iterable[str]) -> bool:
    """Whether one of the others has nearly the same set of words."""
    with require_extra("the web shop", "webshop"):
        from rapidfuzz.fuzz import token_set_ratio
        from rapidfuzz.utils import default_process

    def normalize(text: str) -> str:
        return default_process(text.translate(_NOT_ASCII))

    ratios = (token_set_ratio(phrase, other, processor=normalize) for other in phrases)
    return any(round(ratio) > _MIN_SIMILARITY for ratio in ratios)


@functools.lru_cache(maxsize=65536)
def extract_nouns(title: str) -> tuple[str, ...]:
    """The nouns and names in a title, in lowercase, with repetitions."""
    tagged = _load_tagger()(_INNER_HYPHEN.sub(" ", title))
    return tuple(
        word.lower()
        for word, tag in tagged
        if word[0].isalpha() and word.lower() not in _NOT_NOUNS
        # An uppercase word tagged as a verb is a name.
        if tag.startswith("NN") or (tag == "VB" and word.isupper())
    )


@functools.cache
def _load_tagger() -> Callable[[str], list[tuple[str, str]]]:
    """The part-of-speech tagger with its lexicon loaded."""
    with require_extra("the web shop", "webshop"):
        from textblob.en import tag
    # Instances start in threads, and `catch_warnings` is not thread-safe.
    with _tagger_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # textblob leaves its files open
        tag("lexicon")
    return cast(Callable[[str], list[tuple[str, str]]], tag)
