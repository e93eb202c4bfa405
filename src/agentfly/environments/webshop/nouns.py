"""The nouns of a product's title, by which the score tells whether two products are of a kind.

WebShop takes what spaCy's large English model calls nouns and names. Here a tagger with a lexicon does, which needs no
download; the rules around it bring it close to what WebShop's own runs show.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import cast

from agentfly.extras import needed

_JOINT = re.compile(r"(?<=[^\W\d])[-/](?=[^\W\d])")
_NEVER = frozenset({"plus"})


@functools.lru_cache(maxsize=65536)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns and names in a title, in small letters, each as often as it stands there."""
    return tuple(word.lower() for word, kind in _tagger()(_JOINT.sub(" ", title)) if _is_noun(word, kind))


@functools.cache
def _tagger() -> Callable[[str], list[tuple[str, str]]]:
    """The tagger, with its lexicon read."""
    with needed("the web shop", "webshop"):
        from textblob.en import tag
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves the closing of its files to the collector
        tag("lexicon")
    return cast(Callable[[str], list[tuple[str, str]]], tag)


def _is_noun(word: str, kind: str) -> bool:
    if not word[0].isalpha() or word.lower() in _NEVER:
        return False
    return kind.startswith("NN") or (kind == "VB" and word.isupper())  # a word in capitals is a name
