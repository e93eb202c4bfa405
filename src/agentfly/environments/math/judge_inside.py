"""Runs in a process of its own, as a script: reads answers, one JSON on each line, and says whether they are right.

An answer may ask for 9**9**9, and no Python code gets a word in before that is worked out. So each judgement has its
seconds of processor time, after which the system ends the process, and the memory of the process is limited.
"""

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


def judged(given: str, right: str) -> dict[str, bool]:
    """Whether the given answer is the right one, and whether that can be read at all."""
    gold = [] if _WORDS.fullmatch(right) else _read(right if _MARKED.search(right) else rf"\boxed{{{right}}}")
    if any(each in (sympy.zoo, sympy.nan) for each in gold):
        gold = []
    ours = _read(_whole(given)) if gold else []
    if _is_number(gold) and not _is_number(ours):
        ours = []  # the judge would work it out, and nobody would have to
    return {"readable": bool(gold), "right": bool(ours) and verify(gold, ours, timeout_seconds=None)}


def _is_number(found: list[Any]) -> bool:
    """Whether what was found in a text is written as a number, so that nothing is left to be worked out."""
    value, text = (found[0], str(found[-1])) if found else (None, "")
    if isinstance(value, sympy.Eq) and value.lhs.is_Symbol:  # x = 42
        value = value.rhs
    if isinstance(value, sympy.Mul) and any(map(_is_scale, value.args)) and len(value.args) == 2:
        value = next(each for each in value.args if not _is_scale(each))
    fractions = [tuple(map(int, filter(None, parts))) for parts in _FRACTION.findall(text)]
    is_done = all(math.gcd(*parts) == 1 < parts[1] for parts in fractions)
    return isinstance(value, sympy.Number) and is_done and not _SEVERAL.search(_FRACTION.sub("", text))


def _is_scale(factor: Any) -> bool:
    """Of a percentage, or of a number in powers of ten."""
    is_power = isinstance(factor, sympy.Pow) and factor.base == 10 and isinstance(factor.exp, sympy.Integer)
    return is_power or factor == sympy.UnevaluatedExpr(sympy.Rational(1, 100))


def _whole(given: str) -> str:
    """What is boxed last; or the text, marked as one formula where it is nothing else: of `6 - 5i`, 5 would be read."""
    if (boxed := given.rfind(r"\boxed")) >= 0:
        return given[boxed:]
    text = given.strip().removesuffix(".")
    is_bare = len(text) <= _LONGEST and not _MARKED.search(text) and _BARE.fullmatch(text)
    return rf"\boxed{{{text}}}" if is_bare else given


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
