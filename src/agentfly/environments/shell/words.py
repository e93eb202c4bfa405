"""Comparing what commands print."""

from __future__ import annotations

import math
import re
from collections import Counter

_WORD = re.compile(r"\w\w+")


def same_output(given: str, right: str, *, ordered: bool) -> bool:
    """Whether the same lines were printed. White space, empty lines and a leading `./` do not count."""
    ours, theirs = _lines(given), _lines(right)
    return ours == theirs if ordered else sorted(ours) == sorted(theirs)


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()).removeprefix("./") for line in text.splitlines() if line.strip()]


def similarity(given: str, right: str) -> float:
    """How alike the words of two texts are: the cosine of their TF-IDF vectors, as InterCode has it."""
    ours, theirs = (Counter(_WORD.findall(text.lower())) for text in (given, right))
    if not ours or not theirs:
        return float(given.split() == right.split())
    weight = {word: math.log(3 / (1 + (word in ours) + (word in theirs))) + 1 for word in ours | theirs}

    def product(one: Counter[str], other: Counter[str]) -> float:
        return sum(one[word] * other[word] * weight[word] ** 2 for word in one.keys() & other.keys())

    return product(ours, theirs) / math.sqrt(product(ours, ours) * product(theirs, theirs))
