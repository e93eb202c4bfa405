"""The nouns of a product's title, by which the score tells whether two products are of a kind.

WebShop takes what spaCy's large English model calls nouns and names. Here a tagger with a lexicon does, which needs no
download; the rules around it bring it close to what WebShop's own runs show.
"""

from __future__ import annotations

import functools
import re

from agentfly.environments.webshop.extra import needed

_JOINT = re.compile(r"(?<=[^\W\d])[-/](?=[^\W\d])")
_NEVER = frozenset({"plus"})


@functools.lru_cache(maxsize=65536)
def nouns(title: str) -> tuple[str, ...]:
    """The nouns and names in a title, in small letters, each as often as it stands there."""
    with needed():
        from textblob.en import tag
    return tuple(word.lower() for word, kind in tag(_JOINT.sub(" ", title)) if _is_noun(word, kind))


def _is_noun(word: str, kind: str) -> bool:
    if not word[0].isalpha() or word.lower() in _NEVER:
        return False
    return kind.startswith("NN") or (kind == "VB" and word.isupper())  # a word in capitals is a name
