"""The functions that are drawn: what is asked for in words, and the Python that does it.

Most are put together of four parts: what is taken, which of it, what is done to each, and what is returned. Letters in
braces are filled in: `{k}`, `{p}` and `{q}` with small numbers, `{c}` with a letter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

Arguments = Callable[[Random], tuple[Any, ...]]
WORDS = (
    "acorn", "amber", "anchor", "apple", "at", "bee", "birch", "by", "cat", "cloud", "copper", "dawn", "ebb", "elm",
    "fern", "go", "harbour", "ice", "ivy", "jade", "kite", "lantern", "level", "moss", "noon", "oak", "orchard",
    "pearl", "quill", "radar", "river", "see", "stone", "tide", "umber", "violet", "we", "willow", "yarrow", "zinc",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Function:
    """A function to be written."""

    statement: str
    parameters: str
    body: str
    arguments: Arguments
    """Draws arguments to call it with."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Parts of which functions are put together."""

    taken: str
    parameters: str
    items: str
    arguments: Arguments
    conditions: Sequence[tuple[str, str]]
    """Words after `that`, and the condition on `x`."""
    changes: Sequence[tuple[str, str]]
    """What is done to each, and the expression of `x`."""
    ends: Sequence[tuple[str, str]]
    """What is returned, and the expression; `@` stands for the items."""

    def draw(self, random: Random) -> Function:
        which, condition = random.choice(self.conditions) if random.random() < 0.8 else ("", "")
        change, expression = random.choice(self.changes) if random.random() < 0.7 else ("", "x")
        end, returned = random.choice(self.ends)
        taken = f"Take {self.taken} that {which}." if which else f"Take {self.taken}."
        items = f"{expression} for x in {self.items}" + (f" if {condition}" if condition else "")
        sentences = " ".join(each for each in (taken, change, end) if each)
        return Function(sentences, self.parameters, f"return {returned.replace('@', items)}", self.arguments)


def _list(random: Random) -> tuple[Any, ...]:
    return ([random.randint(-20, 40) for _ in range(random.randint(5, 9))],)


def _number(low: int, high: int) -> Arguments:
    return lambda random: (random.randint(low, high),)


def _text(random: Random) -> tuple[Any, ...]:
    return (" ".join(random.choices(WORDS, k=random.randint(4, 8))),)


_NUMBER_CONDITIONS = (
    ("are even", "x % 2 == 0"), ("are odd", "x % 2 == 1"), ("are above {k}", "x > {k}"), ("are below {k}", "x < {k}"),
    ("can be divided by {k}", "x % {k} == 0"), ("cannot be divided by {k}", "x % {k} != 0"),
    ("are between {k} and {q}, both included", "{k} <= x <= {q}"),
)  # fmt: skip
_NUMBER_CHANGES = (
    ("Square each.", "x * x"), ("Add {p} to each.", "x + {p}"), ("Subtract {p} from each.", "x - {p}"),
    ("Multiply each by {p}.", "x * {p}"), ("Subtract each from {q}.", "{q} - x"),
)  # fmt: skip
_NUMBER_ENDS = (
    ("Return their sum.", "sum(@)"), ("Return the largest, or 0 if there is none.", "max((@), default=0)"),
    ("Return the smallest, or 0 if there is none.", "min((@), default=0)"),
    ("Return them as a list.", "[@]"), ("Return them as a list, smallest first.", "sorted(@)"),
    ("Return them as a list, last one first.", "[@][::-1]"),
    ("Return what is left of each when it is divided by {p}, as a list.", "[y % {p} for y in (@)]"),
)  # fmt: skip
_WORD_CONDITIONS = (
    ("have more than {l} letters", "len(x) > {l}"), ("have fewer than {m} letters", "len(x) < {m}"),
    ("contain the letter {c}", "'{c}' in x"), ("do not contain the letter {c}", "'{c}' not in x"),
    ("have an even number of letters", "len(x) % 2 == 0"), ("do not begin with {c}", "not x.startswith('{c}')"),
)  # fmt: skip
_WORD_CHANGES = (
    ("Write each backwards.", "x[::-1]"), ("Write each in capitals.", "x.upper()"), ("Write each twice.", "x * 2"),
    ("Keep the first {l} letters of each.", "x[:{l}]"), ("Keep the last {l} letters of each.", "x[-{l}:]"),
    ("Add {c} to the end of each.", "x + '{c}'"), ("Put {c} before each.", "'{c}' + x"),
)  # fmt: skip
_WORD_ENDS = (
    ("Return them as a list.", "[@]"), ("Return them as a list in alphabetical order.", "sorted(@)"),
    ("Return them joined by commas.", "','.join(@)"), ("Return them joined by dashes.", "'-'.join(@)"),
    ("Return them as one text, last one first, with a space between.", "' '.join([@][::-1])"),
    ("Return the list of their lengths.", "[len(y) for y in (@)]"),
)  # fmt: skip


def _pipeline_of_numbers(taken: str, parameters: str, items: str, arguments: Arguments) -> Pipeline:
    return Pipeline(taken, parameters, items, arguments, _NUMBER_CONDITIONS, _NUMBER_CHANGES, _NUMBER_ENDS)


KINDS: dict[str, tuple[Pipeline | Function, ...]] = {
    "numbers": (
        _pipeline_of_numbers("the whole numbers from 1 to n", "n", "range(1, n + 1)", _number(8, 40)),
        _pipeline_of_numbers("the digits of n", "n", "map(int, str(n))", _number(10**5, 10**9)),
        Function(
            "Return number n of the row that begins with {p} and {q} and in which each further number is the sum of "
            "the two before it; {p} is number 0.",
            "n", "a, b = {p}, {q}\nfor _ in range(n):\n    a, b = b, a + b\nreturn a", _number(2, 30),
        ),
        Function(
            "Return the digits of n in base {k} as a list, the lowest first.",
            "n", "digits = []\nwhile n:\n    digits.append(n % {k})\n    n //= {k}\nreturn digits", _number(50, 5000),
        ),
        Function(
            "Return a times {p} if a is more than {k} above b, else b times {q}.",
            "a, b", "return a * {p} if a > b + {k} else b * {q}",
            lambda random: (random.randint(1, 60), random.randint(1, 60)),
        ),
    ),
    "strings": (
        Pipeline("the words of s", "s", "s.split()", _text, _WORD_CONDITIONS, _WORD_CHANGES, _WORD_ENDS),
        Function(
            "Shift every letter of s by {k} places in the alphabet, from z on to a. The letters are small; leave "
            "spaces as they are.",
            "s", "return ''.join(c if c == ' ' else chr((ord(c) - 97 + {k}) % 26 + 97) for c in s)", _text,
        ),
        Function(
            "Leave out every character of s whose place can be divided by {k}; the first is in place 1.",
            "s", "return ''.join(c for place, c in enumerate(s, 1) if place % {k})", _text,
        ),
        Function(
            "Return a dictionary that says for each letter of s how often it is there, without spaces and without "
            "letters that are there fewer than {l} times.",
            "s", "text = s.replace(' ', '')\nreturn {c: text.count(c) for c in text if text.count(c) >= {l}}", _text,
        ),
    ),
    "lists": (
        _pipeline_of_numbers("the numbers in xs", "xs", "xs", _list),
        _pipeline_of_numbers("the sums of neighbours in xs", "xs", "map(sum, zip(xs, xs[1:]))", _list),
        Function("Move the first {l} items of xs to its end, and add {p} to each item.",
                 "xs", "return [x + {p} for x in xs[{l}:] + xs[:{l}]]", _list),
        Function(
            "Return the largest sum of {l} neighbours in xs, times {p}.",
            "xs", "return {p} * max(sum(xs[i:i + {l}]) for i in range(len(xs) - {l} + 1))", _list,
        ),
        Function(
            "Begin with {p} and add the items of xs one by one. Return the list of the sums after each item.",
            "xs", "total, sums = {p}, []\nfor x in xs:\n    total += x\n    sums.append(total)\nreturn sums", _list,
        ),
        Function(
            "Cut xs into pieces of {l}; the last may be shorter. Return the list of their sums, each times {p}.",
            "xs", "return [{p} * sum(xs[i:i + {l}]) for i in range(0, len(xs), {l})]", _list,
        ),
    ),
}  # fmt: skip
