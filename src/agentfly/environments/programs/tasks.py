"""Program synthesis tasks: generated functions, and MBPP from its authors' file.

A generated task has one example in the question and hidden tests. Most functions are composed of four parts: the items
that are taken, a condition on them, a change of each, and what is returned. Letters in braces are placeholders: `{k}`,
`{p}`, `{q}`, `{l}` and `{m}` for small numbers, `{c}` for a letter. The body of the function decides the split of a
task, whatever the function is called.

MBPP (mostly basic Python problems) is read from the folder `code` of AGENTFLY_DATA. The splits are the authors', by
task number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from textwrap import indent
from typing import Any

from agentfly.environments.data import Source, read_rows, validate_split
from agentfly.environments.task_sampling import belongs_to, sample_tasks
from agentfly.errors import DataError

HIDDEN_TESTS = 5
"""Hidden tests of a generated task."""
_MAX_ATTEMPTS = 20
"""Sets of tests that are tried for one function."""
_FUNCTION_NAMES = (
    "answer", "apply", "calculate", "convert", "f", "find", "g", "h", "process", "run", "solve", "transform", "work",
)  # fmt: skip
_WORDS = (
    "acorn", "amber", "anchor", "apple", "at", "bee", "birch", "by", "cat", "cloud", "copper", "dawn", "ebb", "elm",
    "fern", "go", "harbour", "ice", "ivy", "jade", "kite", "lantern", "level", "moss", "noon", "oak", "orchard",
    "pearl", "quill", "radar", "river", "see", "stone", "tide", "umber", "violet", "we", "willow", "yarrow", "zinc",
)  # fmt: skip
MBPP = Source("MBPP", "https://github.com/google-research/google-research/tree/master/mbpp (mbpp.jsonl)", "code")
MBPP_SPLITS = {"prompt": range(1, 11), "test": range(11, 511), "validation": range(511, 601), "train": range(601, 975)}
"""Task numbers of each split; `prompt` tasks are examples for few-shot prompts."""
_MBPP_COLUMNS = {"question": ("query", "text", "prompt"), "solution": ("gold", "code"), "tests": ("tests", "test_list")}
"""Column names in InterCode's file and in the authors' own."""

Arguments = Callable[[Random], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function to be written."""

    statement: str
    parameters: str
    body: str
    arguments: Arguments
    """Draws arguments for a call."""


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """Parts from which functions are composed."""

    items: str
    """The items in words."""
    parameters: str
    expression: str
    """The items as a Python expression."""
    arguments: Arguments
    conditions: Sequence[tuple[str, str]]
    """Words after `that`, and the condition on `x`."""
    changes: Sequence[tuple[str, str]]
    """What is done to each item, and the expression of `x`."""
    results: Sequence[tuple[str, str]]
    """What is returned, and the expression; `@` stands for the items."""

    def draw(self, random: Random) -> FunctionSpec:
        condition_words, condition = random.choice(self.conditions) if random.random() < 0.8 else ("", "")
        change_words, change = random.choice(self.changes) if random.random() < 0.7 else ("", "x")
        result_words, result = random.choice(self.results)
        first = f"Take {self.items} that {condition_words}." if condition_words else f"Take {self.items}."
        statement = " ".join(each for each in (first, change_words, result_words) if each)
        items = f"{change} for x in {self.expression}" + (f" if {condition}" if condition else "")
        return FunctionSpec(statement, self.parameters, f"return {result.replace('@', items)}", self.arguments)


def _list(random: Random) -> tuple[Any, ...]:
    return ([random.randint(-20, 40) for _ in range(random.randint(5, 9))],)


def _number(low: int, high: int) -> Arguments:
    return lambda random: (random.randint(low, high),)


def _text(random: Random) -> tuple[Any, ...]:
    return (" ".join(random.choices(_WORDS, k=random.randint(4, 8))),)


_NUMBER_CONDITIONS = (
    ("are even", "x % 2 == 0"), ("are odd", "x % 2 == 1"), ("are above {k}", "x > {k}"), ("are below {k}", "x < {k}"),
    ("can be divided by {k}", "x % {k} == 0"), ("cannot be divided by {k}", "x % {k} != 0"),
    ("are between {k} and {q}, both included", "{k} <= x <= {q}"),
)  # fmt: skip
_NUMBER_CHANGES = (
    ("Square each.", "x * x"), ("Add {p} to each.", "x + {p}"), ("Subtract {p} from each.", "x - {p}"),
    ("Multiply each by {p}.", "x * {p}"), ("Subtract each from {q}.", "{q} - x"),
)  # fmt: skip
_NUMBER_RESULTS = (
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
_WORD_RESULTS = (
    ("Return them as a list.", "[@]"), ("Return them as a list in alphabetical order.", "sorted(@)"),
    ("Return them joined by commas.", "','.join(@)"), ("Return them joined by dashes.", "'-'.join(@)"),
    ("Return them as one text, last one first, with a space between.", "' '.join([@][::-1])"),
    ("Return the list of their lengths.", "[len(y) for y in (@)]"),
)  # fmt: skip


def _number_pipeline(items: str, parameters: str, expression: str, arguments: Arguments) -> PipelineSpec:
    tables = _NUMBER_CONDITIONS, _NUMBER_CHANGES, _NUMBER_RESULTS
    return PipelineSpec(items, parameters, expression, arguments, *tables)


_SPECS: dict[str, tuple[PipelineSpec | FunctionSpec, ...]] = {
    "numbers": (
        _number_pipeline("the whole numbers from 1 to n", "n", "range(1, n + 1)", _number(8, 40)),
        _number_pipeline("the digits of n", "n", "map(int, str(n))", _number(10**5, 10**9)),
        FunctionSpec(
            "Return number n of the row that begins with {p} and {q} and in which each further number is the sum of "
            "the two before it; {p} is number 0.",
            "n", "a, b = {p}, {q}\nfor _ in range(n):\n    a, b = b, a + b\nreturn a", _number(2, 30),
        ),
        FunctionSpec(
            "Return the digits of n in base {k} as a list, the lowest first.",
            "n", "digits = []\nwhile n:\n    digits.append(n % {k})\n    n //= {k}\nreturn digits", _number(50, 5000),
        ),
        FunctionSpec(
            "Return a times {p} if a is more than {k} above b, else b times {q}.",
            "a, b", "return a * {p} if a > b + {k} else b * {q}",
            lambda random: (random.randint(1, 60), random.randint(1, 60)),
        ),
    ),
    "strings": (
        PipelineSpec("the words of s", "s", "s.split()", _text, _WORD_CONDITIONS, _WORD_CHANGES, _WORD_RESULTS),
        FunctionSpec(
            "Shift every letter of s by {k} places in the alphabet, from z on to a. The letters are small; leave "
            "spaces as they are.",
            "s", "return ''.join(c if c == ' ' else chr((ord(c) - 97 + {k}) % 26 + 97) for c in s)", _text,
        ),
        FunctionSpec(
            "Leave out every character of s whose place can be divided by {k}; the first is in place 1.",
            "s", "return ''.join(c for place, c in enumerate(s, 1) if place % {k})", _text,
        ),
        FunctionSpec(
            "Return a dictionary that says for each letter of s how often it is there, without spaces and without "
            "letters that are there fewer than {l} times.",
            "s", "text = s.replace(' ', '')\nreturn {c: text.count(c) for c in text if text.count(c) >= {l}}", _text,
        ),
    ),
    "lists": (
        _number_pipeline("the numbers in xs", "xs", "xs", _list),
        _number_pipeline("the sums of neighbours in xs", "xs", "map(sum, zip(xs, xs[1:]))", _list),
        FunctionSpec("Move the first {l} items of xs to its end, and add {p} to each item.",
                 "xs", "return [x + {p} for x in xs[{l}:] + xs[:{l}]]", _list),
        FunctionSpec(
            "Return the largest sum of {l} neighbours in xs, times {p}.",
            "xs", "return {p} * max(sum(xs[i:i + {l}]) for i in range(len(xs) - {l} + 1))", _list,
        ),
        FunctionSpec(
            "Begin with {p} and add the items of xs one by one. Return the list of the sums after each item.",
            "xs", "total, sums = {p}, []\nfor x in xs:\n    total += x\n    sums.append(total)\nreturn sums", _list,
        ),
        FunctionSpec(
            "Cut xs into pieces of {l}; the last may be shorter. Return the list of their sums, each times {p}.",
            "xs", "return [{p} * sum(xs[i:i + {l}]) for i in range(0, len(xs), {l})]", _list,
        ),
    ),
}  # fmt: skip
KINDS = tuple(_SPECS)


def draw_tasks(split: str, count: int, seed: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Draw tasks: rows with `id`, `question`, `kind`, the hidden `tests`, `solution` and `example`."""
    if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
        raise DataError(f"functions are over {', '.join(KINDS)}, not {kinds!r:.80}; give a list of these")

    def draw(random: Random, number: int) -> tuple[str, dict[str, Any]] | None:
        kind = kinds[number % len(kinds)]
        spec = random.choice(_SPECS[kind])
        function = spec.draw(random) if isinstance(spec, PipelineSpec) else spec
        small = random.randint(2, 9)
        values = {"k": small, "p": random.randint(2, 9), "q": small + random.randint(2, 9), "l": random.randint(2, 4),
                  "m": random.randint(4, 6), "c": random.choice("abcdehiklmnorstu")}  # fmt: skip
        statement, body = function.statement, function.body
        for letter, value in values.items():  # not by str.format: the code has braces of its own
            statement, body = (text.replace(f"{{{letter}}}", str(value)) for text in (statement, body))
        if not belongs_to(body, split):  # checked here too, before the slow search for tests
            return None
        columns = _make_columns(replace(function, statement=statement, body=body), random)
        return None if columns is None else (body, {"question": columns.pop("question"), "kind": kind, **columns})

    return sample_tasks("programs", split, count, seed, draw)


def _make_columns(function: FunctionSpec, random: Random) -> dict[str, Any] | None:
    """Return the columns of a task; None if no tests were found that a trivial function fails.

    A constant, or a function that returns an argument, must pass at most one of the tests: all arguments and all values
    differ, and no value equals an argument.
    """
    name = random.choice(_FUNCTION_NAMES)
    solution = f"def {name}({function.parameters}):\n{indent(function.body, '    ')}"
    names: dict[str, Any] = {}
    exec(solution, names)  # code of this module
    for _ in range(_MAX_ATTEMPTS):
        calls = [function.arguments(random) for _ in range(HIDDEN_TESTS + 1)]
        values = [names[name](*arguments) for arguments in calls]
        if len(set(map(repr, calls))) < len(calls) or len(set(map(repr, values))) < len(values):
            continue
        if any(value == argument for arguments, value in zip(calls, values, strict=True) for argument in arguments):
            continue
        example, *tests = (
            f"assert {name}({', '.join(map(repr, arguments))}) == {value!r}"
            for arguments, value in zip(calls, values, strict=True)
        )
        question = f"Write {name}({function.parameters}). {function.statement}\n{example}"
        return {"question": question, "tests": tests, "solution": solution, "example": example}
    return None


def mbpp_tasks(split: str, *, shown: int = 1) -> list[dict[str, Any]]:
    """Load the tasks of MBPP.

    Args:
        split: `prompt`, `test`, `validation` or `train`.
        shown: Number of tests in the question, from which the model learns the function's name. The other ones decide
            the reward; if all are shown, all decide.
    """
    numbers = MBPP_SPLITS[validate_split(split, tuple(MBPP_SPLITS))]
    if shown < 1:
        raise DataError(f"shown={shown}: at least one test must be shown, or the function's name is unknown")
    tasks = []
    for place, row in read_rows(MBPP.file("mbpp.json", "mbpp.jsonl")):
        if not isinstance(row.get("task_id"), int):
            raise DataError(
                f"{place}: a task of MBPP has its number as task_id, by which it is in a split, not {row!r:.80}"
            )
        if row["task_id"] not in numbers:
            continue
        columns = {
            name: next((row[each] for each in keys if each in row), None) for name, keys in _MBPP_COLUMNS.items()
        }
        tests = columns["tests"]
        texts = [columns["question"], columns["solution"], *(tests if isinstance(tests, list) else [None])]
        if not tests or not all(isinstance(each, str) for each in texts):
            raise DataError(f"{place}: a task of MBPP has a question, a solution and a list of tests, not {row!r:.80}")
        statement, solution, *tests = (each.replace("\r\n", "\n").strip() for each in texts)
        examples = "\n".join(tests[:shown])
        task = {
            "id": f"mbpp/{row['task_id']}",
            "question": f"{statement}\nIt must pass tests such as:\n{examples}",
            "tests": tests[shown:] or tests,
            "setup": str(row.get("test_setup_code") or "").replace("\r\n", "\n"),
            "solution": solution,
            "example": tests[0],
        }
        tasks.append(task)
    return tasks
