"""How well a purchase grants a wish: `type × (attributes + options + price) / n`, as WebShop defines it.

WebShop asks spaCy's large English model for the nouns of a title; here a tagger does that comes with no download. All
else is the same to the letter, but that a score never exceeds 1, which chosen options could otherwise bring about that
nobody had asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentfly.environments.webshop.goal import Goal
from agentfly.environments.webshop.nouns import nouns
from agentfly.environments.webshop.product import Product
from agentfly.extras import needed

_CLOSE = 85
"""Of 100, above which two phrases mean the same."""
_COLOURS = tuple(
    """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo caramel
champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal dark denim
eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory ivy khaki
lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard
natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell silver
skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow
""".split()  # noqa: SIM905 (a hundred quoted words would be hard to read)
)
"""A value that contains one of these counts as the first that it contains."""
_NOT_ASCII = dict.fromkeys(range(128, 256))


@dataclass(frozen=True, slots=True)
class Score:
    """A purchase's score, and what it is made of."""

    reward: float
    type: float
    """1, 0.5, 0.1 or 0: whether it is the kind of product that was asked for."""
    attributes: float
    """The part of the attributes that the product has."""
    options: float
    """Chosen options that were asked for, over those asked for; 1 where none was."""
    price: float
    """1 where it costs no more than it may, else 0."""


def score(product: Product, goal: Goal, chosen: Mapping[str, str]) -> Score:
    """Score the purchase of a product with the options that were chosen."""
    kind = _type(product, goal)
    text = _Words(product)
    attributes = sum(_has(product, text, attribute) for attribute in goal.attributes)
    options = sum(_is_wanted(name, value, text, goal.options) for name, value in chosen.items())
    price = float(product.price <= goal.price_upper)
    asked = len(goal.attributes) + len(goal.options) + 1
    return Score(
        reward=min(1.0, kind * (attributes + options + price) / asked),
        type=kind,
        attributes=attributes / len(goal.attributes),
        options=options / len(goal.options) if goal.options else 1.0,
        price=price,
    )


class _Words:
    """What a product's own page says, in small letters."""

    def __init__(self, product: Product) -> None:
        self._texts = (product.title.lower(), " ".join(product.features).lower(), product.description.lower())

    def __contains__(self, phrase: str) -> bool:
        return any(phrase in text for text in self._texts)


def _type(product: Product, goal: Goal) -> float:
    wanted = nouns(goal.name)
    shared = len({*nouns(product.title)} & {*wanted}) / len(wanted) if wanted else 0.2
    if shared < 0.1:
        return 0.1 if shared else 0.0
    same = product.query == goal.query or len(_path(product.product_category) & _path(goal.product_category)) >= 2
    return 1.0 if same or shared > 0.2 else 0.5


def _path(product_category: str) -> set[str]:
    return {name.strip() for name in product_category.split("›")}


def _has(product: Product, text: _Words, attribute: str) -> bool:
    return _is_close(attribute, product.attributes) or attribute in text


def _is_wanted(name: str, value: str, text: _Words, wanted: Iterable[str]) -> bool:
    value, wanted = _colour(value), [_colour(each) for each in wanted]
    found = value in wanted if name.lower() == "size" else _is_close(value, wanted)
    return found or value in text


def _colour(value: str) -> str:
    return next((colour for colour in _COLOURS if colour in value), value)


def _is_close(phrase: str, others: Iterable[str]) -> bool:
    """Whether one of the others has the same words, or nearly so."""
    with needed("the web shop", "webshop"):
        from rapidfuzz.fuzz import token_set_ratio
        from rapidfuzz.utils import default_process

    def plain(text: str) -> str:
        return default_process(text.translate(_NOT_ASCII))

    return any(round(token_set_ratio(plain(phrase), plain(other))) > _CLOSE for other in others)
