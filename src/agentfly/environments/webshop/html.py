"""Pages as HTML, for people and for models that see."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING

from agentfly.environments.webshop.pages import Part

if TYPE_CHECKING:
    from jinja2 import Template


def page_html(page: Sequence[Part]) -> str:
    """A page that needs nothing but itself."""
    return _template().render(page=page)


@functools.cache
def _template() -> Template:
    from jinja2 import Environment

    source = resources.files(__package__).joinpath("page.html.jinja").read_text()
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
