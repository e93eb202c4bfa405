"""Pages as lists of parts, from which text, HTML and the clickable elements are derived."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template

SEARCH, BACK, NEXT, PREVIOUS, BUY = "Search", "Back to Search", "Next >", "< Prev", "Buy Now"
DESCRIPTION, FEATURES, REVIEWS = "Description", "Features", "Reviews"
INSTRUCTION_LABEL = "Instruction:"
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
    """Name of the option whose value `text` is. Empty for other parts."""
    clicked: bool = False
    """Whether the option is chosen or the product was visited."""


def text(words: str) -> PagePart:
    """A text part."""
    return PagePart(PartType.TEXT, words)


def buttons(*labels: str) -> list[PagePart]:
    """One button per label."""
    return [PagePart(PartType.BUTTON, label) for label in labels]


def render_text(page: Iterable[PagePart]) -> str:
    """WebShop's plain text: all parts, separated by `[SEP]`."""
    return " [SEP] ".join(page_part.text.strip() for page_part in page)


def render_brief(page: Sequence[PagePart]) -> str:
    """Plain text without the instruction; once options are chosen, only these."""
    if chosen := _chosen_options(page):
        return f"You have clicked {', '.join(chosen)}."
    return render_text(page[2 if page[0].text == INSTRUCTION_LABEL else 0 :])


def render_rich(page: Sequence[PagePart]) -> str:
    """WebShop's rich text: the chosen options, then one line per part, with marked buttons."""
    lines = [f"You have clicked {option}." for option in reversed(_chosen_options(page))]
    for page_part in page:
        if page_part.kind in (PartType.TEXT, PartType.HEADING):
            lines.append(page_part.text)
        else:
            name = "clicked button" if page_part.clicked else "button"
            indent = {PartType.LINK: "\n", PartType.OPTION: "  "}.get(page_part.kind, "")
            lines.append(f"{indent}[{name}] {page_part.text} [{name}_]")
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
    return [page_part.text for page_part in page if page_part.kind is PartType.OPTION and page_part.clicked]
