"""The nouns of a product's title, by which the score tells whether two products are of a kind."""

from __future__ import annotations

import functools

from agentfly.environments.webshop.extra import needed


@functools.lru_cache(maxsize=65536)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns and names in a title, in small letters, each as often as it stands there."""
    with needed():
        from textblob.en import tag
    return tuple(word.lower() for word, kind in tag(title) if kind.startswith("NN"))
