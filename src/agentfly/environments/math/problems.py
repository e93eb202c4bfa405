"""The kinds of problems that are drawn, as `problems.toml` has them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from random import Random

_WHO = ("Ada", "Ben", "Chen", "Dora", "Emil", "Fatima", "Gita", "Hugo", "Ines", "Jona", "Kofi", "Lena", "Mira", "Noor")
_THINGS = ("apples", "bolts", "candles", "coins", "eggs", "lamps", "marbles", "nails", "pencils", "stamps", "tiles")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of problem."""

    level: int
    question: str
    program: str
    ranges: Mapping[str, Sequence[int]]
    """The least and the greatest value of each number."""

    def draw(self, random: Random) -> tuple[str, str]:
        """A question, and the program that works out its answer."""
        numbers = {name: random.randint(*limits) for name, limits in self.ranges.items()}
        words = {"who": random.choice(_WHO), "thing": random.choice(_THINGS)}
        months = {f"month_{name}": _MONTHS[number - 1] for name, number in numbers.items() if number <= len(_MONTHS)}
        return self.question.format(**numbers, **words, **months), self.program.format(**numbers)


@cache
def kinds_of(level: int) -> tuple[Kind, ...]:
    """The kinds of a level."""
    text = (resources.files(__package__) / "problems.toml").read_text()
    return tuple(Kind(**each) for each in tomllib.loads(text)["kinds"] if each["level"] == level)
