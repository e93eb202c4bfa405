"""Pages as lists of parts, from which text, HTML and the clickable elements are derived."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from agentfly.environments.webshop.product import ShopProduct

if TYPE_CHECKING:
    from jinja2 import Template

SEARCH, BACK, NEXT, PREVIOUS, BUY = "Search", "Back to Search", "Next >", "< Prev", "Buy Now"
DESCRIPTION, FEATURES, REVIEWS = "Description", "Features", "Reviews"
_WISH = "Instruction:"
WINDOW = 10
"""Products per page of results in WebShop."""


class PartType(enum.Enum):
    """Type of a page part."""

    TEXT = "text"
    HEADING = "heading"
    BUTTON = "button"
    LINK = "link"
    """A product number that links to the product's page."""
    OPTION = "option"


@dataclass(frozen=True, slots=True)
class PagePart:
    """An element of a page."""

    kind: PartType
    text: str
    option: str = ""
    """Name of the option whose value `text` is; empty for other parts."""
    clicked: bool = False
    """Whether the option is chosen or the product was visited."""


def text(words: str) -> PagePart:
    """A text part."""
    return PagePart(PartType.TEXT, words)


def buttons(*labels: str) -> list[PagePart]:
    """One button per label."""
    return [PagePart(PartType.BUTTON, label) for label in labels]


def search_page(instruction: str) -> list[PagePart]:
    """The start page."""
    return [PagePart(PartType.HEADING, "WebShop"), text(_WISH), text(instruction), *buttons(SEARCH)]


def results_page(
    instruction: str, found: Sequence[ShopProduct], *, number: int, seen: Iterable[str], window: int
) -> list[PagePart]:
    """Page `number` (from 1) of the results, with `window` products."""
    first, last = (number - 1) * window, number * window
    navigation = buttons(*([PREVIOUS] if number > 1 else []), NEXT)  # NEXT is always there, as in WebShop
    total = text(f"Page {number} (Total results: {len(found)})")
    listed: list[PagePart] = []
    for product in found[first:last]:
        link = PagePart(PartType.LINK, product.asin, clicked=product.asin in seen)
        listed += [link, text(product.title), text(product.price_tag)]
    return [*_head(instruction), total, *navigation, *listed]


def item_page(instruction: str, product: ShopProduct, chosen: Iterable[str]) -> list[PagePart]:
    """A product with its options."""
    options: list[PagePart] = []
    for name, values in product.options.items():
        options.append(PagePart(PartType.HEADING, name))
        options += [PagePart(PartType.OPTION, value, name, value in chosen) for value in values]
    about = [PagePart(PartType.HEADING, product.title), text(f"Price: {product.price_tag}"), text("Rating: N.A.")]
    more = buttons(DESCRIPTION, FEATURES, REVIEWS, BUY)
    return [*_head(instruction), *buttons(PREVIOUS), *options, *about, *more]


def sub_page(instruction: str, product: ShopProduct, about: str) -> list[PagePart]:
    """The description, features or reviews of a product."""
    lines = {DESCRIPTION: (product.description,), FEATURES: product.features, REVIEWS: ()}[about]
    return [
        *_head(instruction),
        *buttons(PREVIOUS),
        *map(text, filter(str.strip, lines) if any(lines) else [f"No {about}"]),
    ]


def done_page(reward: float) -> list[PagePart]:
    """The page after the purchase."""
    thanks = PagePart(PartType.HEADING, "Thank you for shopping with us!")
    return [thanks, text("Your score (min 0.0, max 1.0)"), text(str(reward))]


def _head(instruction: str) -> list[PagePart]:
    return [text(_WISH), text(instruction), *buttons(BACK)]


_CLICK_ORDER = {PartType.BUTTON: 0, PartType.LINK: 1, PartType.OPTION: 2}


def find_clickable(page: Iterable[PagePart]) -> dict[str, PagePart]:
    """Clickable parts by lowercase label: buttons, then links, then options."""
    parts = sorted((part for part in page if part.kind in _CLICK_ORDER), key=lambda part: _CLICK_ORDER[part.kind])
    return {part.text.lower().strip(): part for part in parts}


def render_text(page: Iterable[PagePart]) -> str:
    """WebShop's plain text: all parts, separated by `[SEP]`."""
    return " [SEP] ".join(part.text.strip() for part in page)


def render_brief(page: Sequence[PagePart]) -> str:
    """Plain text without the instruction; once options are chosen, only these."""
    if chosen := _chosen_options(page):
        return f"You have clicked {', '.join(chosen)}."
    return render_text(page[2 if page[0].text == _WISH else 0 :])


def render_rich(page: Sequence[PagePart]) -> str:
    """WebShop's rich text: the chosen options, then one line per part, with marked buttons."""
    lines = [f"You have clicked {each}." for each in reversed(_chosen_options(page))]
    for part in page:
        if part.kind in (PartType.TEXT, PartType.HEADING):
            lines.append(part.text)
        else:
            name = "clicked button" if part.clicked else "button"
            indent = {PartType.LINK: "\n", PartType.OPTION: "  "}.get(part.kind, "")
            lines.append(f"{indent}[{name}] {part.text} [{name}_]")
    return "".join(f"{line}\n" for line in lines)


def render_html(page: Sequence[PagePart]) -> str:
    """A self-contained HTML page, for people and for vision models."""
    return _load_template().render(page=page)


@functools.cache
def _load_template() -> Template:
    from jinja2 import Environment

    source = resources.files(__package__).joinpath("page.html.jinja").read_text()
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)


def _chosen_options(page: Iterable[PagePart]) -> list[str]:
    return [part.text for part in page if part.kind is PartType.OPTION and part.clicked]
