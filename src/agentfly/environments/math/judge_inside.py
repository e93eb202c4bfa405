"""Runs in a process of its own, as a script: reads answers, one JSON on each line, and says whether they are right.

An answer may ask for 9**9**9, and no Python code gets a word in before that is worked out. So each judgement has its
seconds of processor time, after which the system ends the process, and the memory of the process is limited.
"""

import decimal
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_TARGETS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_MARKED = re.compile(r"\\boxed|(?<!\\)\$")
"""Where an answer in a text is marked as a formula."""
_BARE = re.compile(
    r"(?:\\text\{[^{}$]*\}|\\(?!text\b)[a-zA-Z]+|\\[^a-zA-Z]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|[^a-zA-Z$\n\\])+|[a-zA-Z]+"
)
"""A formula or a single word, and nothing else."""
_LONGEST = 200
_FRACTION = re.compile(r"(?:\\[dt]?frac\s*(?:(?=\d)|\{))(-?\d+?)(?:\}\s*\{|\s*)(\d+)\}?|(\d+)\s*/\s*(\d+)")
"""Above and below, in either way of writing."""
_SEVERAL = re.compile(r"\d[\s(){}]+[\d(]")
"""Two numbers beside one another, which math-verify takes for a whole and a fraction, and adds."""
_WORDS = re.compile(r"[a-zA-Z]+(?:\s+[a-zA-Z]+)+")
_THIN_SPACE = r"(?:\\[,;:! ]|~|[\u2009\u202f\u00a0])"
_GROUPS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_THIN_SPACE}\d{{3}})+(?!\d|{_THIN_SPACE}\d)")
"""Digits in groups of three, as in `1\\,000\\,000`."""
_SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?")
"""The same with plain spaces: a number only where nothing else is there."""
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?[eE][+-]?\d{1,2})(?!\w|\.\d)")
"""A number in the exponent notation of programs, as in `1e6`."""
_MATRIX = re.compile(r"\\begin\{([a-z]*matrix|array)\}(?:(?!\\begin)[\s\S])*\\end\{\1\}")
_SAYS_ANSWER, _SAYS = ("answer is", "answer:", "answer ="), (" is", "=", ":")
_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(pi(?![a-zA-Z])|(?:ln|log|sin|cos|tan)(?=\s*\(|\s+\d))")
_BOXED_PLAIN = re.compile(r"\\boxed\{([^{}\\]*)\}")
"""A box without LaTeX in it."""
_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(|√\s*\(|√\s*(\d+|[a-zA-Z])")


def judged(given: str, right: str) -> dict[str, bool]:
    """Whether the given answer is the right one, and whether that can be read at all."""
    right = _written_out(right)
    gold = [] if _WORDS.fullmatch(right) else _read(right if _MARKED.search(right) else rf"\boxed{{{_latex(right)}}}")
    if any(each in (sympy.zoo, sympy.nan) for each in gold):
        gold = []
    ours = _read(_whole(_written_out(given))) if gold else []
    if _is_number(gold) and not _is_number(ours):
        ours = []  # the judge would work it out, and nobody would have to
    # math-verify reads a pair such as (3, 4) as an interval: `3 < x < 4` equals only what can be nothing else.
    is_interval = re.search(r"[\[\]]|\\infty|\\cup", right) is not None
    is_right = bool(ours) and verify(gold, ours, timeout_seconds=None, allow_set_relation_comp=is_interval)
    return {"readable": bool(gold), "right": is_right}


def _written_out(text: str) -> str:
    """A text with its numbers in plain digits: `1\\,000\\,000` and `1e6` are 1000000."""
    text = _GROUPS.sub(lambda found: "".join(filter(str.isdigit, found[0])), text)
    return _EXPONENT.sub(lambda found: f"{decimal.Decimal(found[0]):f}", text)


def _latex(formula: str) -> str:
    """A formula with the notation of programs in LaTeX: `sqrt(2)`, `√2`, `2*pi`."""
    if _SPACED.fullmatch(formula):
        return formula.replace(" ", "")
    if r"\text" in formula:
        return formula
    formula = re.sub(r"\^-(\d+)", r"^{-\1}", formula)
    return _FUNCTION.sub(r"\\\1 ", _with_roots(formula))


def _with_roots(formula: str) -> str:
    written, at = "", 0
    while found := _ROOT.search(formula, at):
        inside, end = found[1], found.end()
        if inside is None:
            end = _closing(formula, found.end())
            if end < 0:
                break
            inside = _with_roots(formula[found.end() : end])
            end += 1
        written, at = rf"{written}{formula[at : found.start()]}\sqrt{{{inside}}}", end
    return written + formula[at:]


def _closing(text: str, at: int) -> int:
    """The place of the parenthesis that closes one that opened before `at`; -1 if there is none."""
    depth = 1
    for place in range(at, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return -1


def _is_number(found: list[Any]) -> bool:
    """Whether what was found in a text is written as a number, so that nothing is left to be worked out."""
    value, text = (found[0], str(found[-1])) if found else (None, "")
    if isinstance(value, sympy.Eq) and value.lhs.is_Symbol:  # x = 42
        value = value.rhs
    if isinstance(value, sympy.Mul) and any(map(_is_scale, value.args)) and len(value.args) == 2:
        value = next((each for each in value.args if not _is_scale(each)), None)
    fractions = [tuple(map(int, filter(None, parts))) for parts in _FRACTION.findall(text)]
    is_done = all(math.gcd(*parts) == 1 < parts[1] for parts in fractions)
    is_number = isinstance(value, sympy.Number) or _is_power_of_ten(value)
    return is_number and is_done and not _SEVERAL.search(_FRACTION.sub("", text))


def _is_scale(factor: Any) -> bool:
    """Of a percentage, or of a number in powers of ten."""
    return _is_power_of_ten(factor) or factor == sympy.UnevaluatedExpr(sympy.Rational(1, 100))


def _is_power_of_ten(value: Any) -> bool:
    return isinstance(value, sympy.Pow) and value.base == 10 and isinstance(value.exp, sympy.Integer)


def _whole(given: str) -> str:
    """What is boxed last; or the text, or what it says the answer is, marked as one formula where that is nothing else:
    of `6 - 5i`, 5 would be read."""
    if (boxed := given.rfind(r"\boxed")) >= 0:
        return _BOXED_PLAIN.sub(lambda found: rf"\boxed{{{_latex(found[1])}}}", given[boxed:])
    text = given.strip().removesuffix(".")
    if _MARKED.search(text):
        return given
    for said in (text, text[_end_of_last(text, _SAYS_ANSWER) :].strip(" :")):
        formula = _latex(said).replace(" or ", ", ")  # two answers are not one of them
        bare = _MATRIX.sub("0", formula)
        if len(bare) <= _LONGEST and _BARE.fullmatch(bare):
            return rf"\boxed{{{formula}}}"
    matrix = text[_end_of_last(text, _SAYS) :].strip()
    return rf"\boxed{{{matrix}}}" if _MATRIX.fullmatch(matrix) else given


def _end_of_last(text: str, phrases: tuple[str, ...]) -> int:
    """Where the last of these phrases ends; 0 where there is none."""
    lower = text.lower()
    return max(place + len(each) if (place := lower.rfind(each)) >= 0 else 0 for each in phrases)


def _read(text: str) -> list[Any]:
    found: list[Any] = parse(text, _TARGETS, parsing_timeout=None)
    return found


def main(seconds: float, memory: int) -> None:
    """Answer until nobody asks any more."""
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with os.fdopen(os.dup(1), "w") as replies, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # whatever a library prints is no reply
        judged("1", "1")  # what is loaded at the first use is no answer's fault
        print("ready", file=replies, flush=True)
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # unhandled, its signal ends the process
            try:
                said = judged(**json.loads(line))
            except MemoryError:
                return  # what is left of the memory is no help to the next answer
            except Exception:  # of a parser that was not made for such a text
                said = {"readable": True, "right": False}
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(said), file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
