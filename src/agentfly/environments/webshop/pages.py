"""Pages as a list of parts, from which text, HTML and what can be clicked are all made."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agentfly.environments.webshop.product import Product

SEARCH, BACK, NEXT, PREVIOUS, BUY = "Search", "Back to Search", "Next >", "< Prev", "Buy Now"
DESCRIPTION, FEATURES, REVIEWS = "Description", "Features", "Reviews"
_WISH = "Instruction:"
WINDOW = 10
"""Products on a page of WebShop's results."""


class Kind(enum.Enum):
    """What a part of a page is."""

    TEXT = "text"
    HEADING = "heading"
    BUTTON = "button"
    LINK = "link"
    """The number of a product, which leads to its page."""
    OPTION = "option"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a page."""

    kind: Kind
    text: str
    option: str = ""
    """Of an option: its name, of which the text is a value."""
    clicked: bool = False
    """Whether the option is chosen, or the product was looked at."""


def text(words: str) -> Part:
    """Something to read."""
    return Part(Kind.TEXT, words)


def buttons(*labels: str) -> list[Part]:
    """Things to click."""
    return [Part(Kind.BUTTON, label) for label in labels]


def search_page(instruction: str) -> list[Part]:
    """Where a session begins."""
    return [Part(Kind.HEADING, "WebShop"), text(_WISH), text(instruction), *buttons(SEARCH)]


def results_page(
    instruction: str, found: Sequence[Product], number: int, seen: Iterable[str], window: int
) -> list[Part]:
    """One page, counted from 1, of what was found: so many products."""
    first, last = (number - 1) * window, number * window
    turns = buttons(*([PREVIOUS] if number > 1 else []), NEXT)  # also where nothing follows, as in WebShop
    total = text(f"Page {number} (Total results: {len(found)})")
    listed = [part for product in found[first:last] for part in _listed(product, product.asin in seen)]
    return [*_head(instruction), total, *turns, *listed]


def _listed(product: Product, seen: bool) -> Iterator[Part]:
    yield Part(Kind.LINK, product.asin, clicked=seen)
    yield text(product.title)
    yield text(product.price_tag)


def item_page(instruction: str, product: Product, chosen: Iterable[str]) -> list[Part]:
    """A product, with its options."""
    options: list[Part] = []
    for name, values in product.options.items():
        options.append(Part(Kind.HEADING, name))
        options += [Part(Kind.OPTION, value, name, value in chosen) for value in values]
    about = [Part(Kind.HEADING, product.title), text(f"Price: {product.price_tag}"), text("Rating: N.A.")]
    more = buttons(DESCRIPTION, FEATURES, REVIEWS, BUY)
    return [*_head(instruction), *buttons(PREVIOUS), *options, *about, *more]


def sub_page(instruction: str, product: Product, about: str) -> list[Part]:
    """What a product's page says under Description, Features or Reviews."""
    said = {DESCRIPTION: (product.description,), FEATURES: product.features, REVIEWS: ()}[about]
    return [
        *_head(instruction),
        *buttons(PREVIOUS),
        *map(text, filter(str.strip, said) if any(said) else [f"No {about}"]),
    ]


def done_page(reward: float) -> list[Part]:
    """The end of a session."""
    thanks = Part(Kind.HEADING, "Thank you for shopping with us!")
    return [thanks, text("Your score (min 0.0, max 1.0)"), text(str(reward))]


def _head(instruction: str) -> list[Part]:
    return [text(_WISH), text(instruction), *buttons(BACK)]


def clickable(page: Iterable[Part]) -> dict[str, Part]:
    """What can be clicked, by its words in small letters: buttons and links, then options."""
    parts = sorted((part for part in page if part.kind in _ORDER), key=lambda part: _ORDER[part.kind])
    return {part.text.lower().strip(): part for part in parts}


_ORDER = {Kind.BUTTON: 0, Kind.LINK: 1, Kind.OPTION: 2}


def plain(page: Iterable[Part]) -> str:
    """A page in WebShop's plain form: everything that stands on it, `[SEP]` between."""
    return " [SEP] ".join(part.text.strip() for part in page)


def brief(page: Sequence[Part]) -> str:
    """What is new to the customer: the plain form without the wish; once options are chosen, only which."""
    chosen = _chosen(page)
    return f"You have clicked {', '.join(chosen)}." if chosen else plain(page[2 if page[0].text == _WISH else 0 :])


def rich(page: Sequence[Part]) -> str:
    """A page in WebShop's rich form: a line for each part, buttons marked, and what was clicked."""
    said = [f"You have clicked {each}.\n" for each in reversed(_chosen(page))]
    return "".join([*said, *(f"{_rich(part)}\n" for part in page)])


def _chosen(page: Iterable[Part]) -> list[str]:
    return [part.text for part in page if part.kind is Kind.OPTION and part.clicked]


def _rich(part: Part) -> str:
    if part.kind in (Kind.TEXT, Kind.HEADING):
        return part.text
    name = "clicked button" if part.clicked else "button"
    before = {Kind.LINK: "\n", Kind.OPTION: "  "}.get(part.kind, "")
    return f"{before}[{name}] {part.text} [{name}_]"
