"""Worker process of MathJudge, run as a script: reads answers as frames of JSON, replies whether they are right.

An answer may ask for 9**9**9, which is one operation that no Python code can interrupt. So each comparison has a limit
of CPU time, after which the kernel ends the process, and the memory of the process is limited.
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

from agentfly.sandbox.inside.frames import DATA, NO_LIMIT, PipeChannel, pack, receive

_TARGETS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_MARKED = re.compile(r"\\boxed|(?<!\\)\$")
"""A text whose answer is marked as a formula."""
_BARE = re.compile(
    r"(?:\\text\{[^{}$]*\}|\\(?!text\b)[a-zA-Z]+|\\[^a-zA-Z]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|[^a-zA-Z$\n\\])+|[a-zA-Z]+"
)
"""A formula or a single word, and nothing else."""
_MAX_BARE = 200
_FRACTION = re.compile(r"(?:\\[dt]?frac\s*(?:(?=\d)|\{))(-?\d+?)(?:\}\s*\{|\s*)(\d+)\}?|(\d+)\s*/\s*(\d+)")
"""Numerator and denominator, as LaTeX or with a slash."""
_SEVERAL = re.compile(r"\d[\s(){}]+[\d(]")
"""Two adjacent numbers, which math-verify adds as an integer and a fraction."""
_WORDS = re.compile(r"[a-zA-Z]+(?:\s+[a-zA-Z]+)+")
_THIN_SPACE = r"(?:\\[,;:! ]|~|[\u2009\u202f\u00a0])"
_GROUPS = re.compile(rf"(?<![\d.,])[1-9]\d{{0,2}}(?:{_THIN_SPACE}\d{{3}})+(?!\d|{_THIN_SPACE}\d)")
"""Digits in groups of three, as in `1\\,000\\,000`."""
_SPACED = re.compile(r"-?[1-9]\d{0,2}(?: \d{3})+(?:\.\d+)?")
"""The same with plain spaces: a number only if the text has nothing else."""
_EXPONENT = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?[eE][+-]?\d{1,2})(?!\w|\.\d)")
"""A number in scientific notation, as in `1e6`."""
_MATRIX = re.compile(r"\\begin\{([a-z]*matrix|array)\}(?:(?!\\begin)[\s\S])*\\end\{\1\}")
_ANSWER_PHRASES = ("answer is", "answer:", "answer =")
_RESULT_PHRASES = (" is", "=", ":")
_FUNCTION = re.compile(r"(?<![\\a-zA-Z])(pi(?![a-zA-Z])|(?:ln|log|sin|cos|tan)(?=\s*\(|\s+\d))")
_BOXED_PLAIN = re.compile(r"\\boxed\{([^{}\\]*)\}")
"""A box without LaTeX in it."""
_EMPHASIS = re.compile(r"(?<![\w)\]}\\])(\*{1,3}|_{1,3}|`{1,3})(?=\S)((?:[^\n*`]| \* ){1,200}?)(?<=\S)\1(?![\w(*`])")
"""Text in bold, italics or code of Markdown. A product or a power (`2 ** 10`, `2**3**2`) is none."""
_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(|√\s*\(|√\s*(\d+|[a-zA-Z])")


def compare(answer: str, right: str) -> dict[str, bool]:
    """Whether the answer equals the right one, and whether the right one can be read as mathematics."""
    right = _expand_numbers(right)
    gold: list[Any] = []
    if not _WORDS.fullmatch(right):
        marked = right if _MARKED.search(right) else rf"\boxed{{{_to_latex(right)}}}"
        gold = parse(marked, _TARGETS, parsing_timeout=None)
    if any(value in (sympy.zoo, sympy.nan) for value in gold):
        gold = []
    answer = _EMPHASIS.sub(r"\2", _EMPHASIS.sub(r"\2", answer)).strip()  # twice: `**_10_**`
    if _is_number(gold):
        answer = answer.rstrip("!")  # a computed number is no factorial
    parsed = parse(_mark_answer(_expand_numbers(answer)), _TARGETS, parsing_timeout=None) if gold else []
    if _is_number(gold) and not _is_number(parsed):
        # The result of `f(2) = 10` or `x = 5 * 2 = 10`. Otherwise nothing: math-verify would compute the number, which
        # is what the model has to do.
        result = _result_of_equation(parsed)
        parsed = parse(rf"\boxed{{{result}}}", _TARGETS, parsing_timeout=None) if result else []
        parsed = parsed if _is_number(parsed) else []
    # math-verify reads a pair such as (3, 4) as an interval: `3 < x < 4` equals only what can be nothing else.
    is_interval = re.search(r"[\[\]]|\\infty|\\cup", right) is not None
    is_right = bool(parsed) and verify(gold, parsed, timeout_seconds=None, allow_set_relation_comp=is_interval)
    return {"readable": bool(gold), "right": is_right}


def _expand_numbers(text: str) -> str:
    """Write numbers in plain digits: `1\\,000\\,000` and `1e6` as 1000000."""
    text = _GROUPS.sub(lambda match: "".join(filter(str.isdigit, match[0])), text)
    return _EXPONENT.sub(lambda match: f"{decimal.Decimal(match[0]):f}", text)


def _to_latex(formula: str) -> str:
    """Convert the notation of programs to LaTeX: `sqrt(2)`, `√2`, `2*pi`."""
    if _SPACED.fullmatch(formula):
        return formula.replace(" ", "")
    if r"\text" in formula:
        return formula
    formula = re.sub(r"\^-(\d+)", r"^{-\1}", formula)
    return _FUNCTION.sub(r"\\\1 ", _convert_roots(formula))


def _convert_roots(formula: str) -> str:
    converted = ""
    position = 0
    while root := _ROOT.search(formula, position):
        radicand, end = root[1], root.end()
        if radicand is None:  # it is in parentheses: find the closing one
            depth = 1
            for end in range(root.end(), len(formula)):
                depth += (formula[end] == "(") - (formula[end] == ")")
                if depth == 0:
                    break
            if depth:
                break
            radicand = _convert_roots(formula[root.end() : end])
            end += 1
        converted = rf"{converted}{formula[position : root.start()]}\sqrt{{{radicand}}}"
        position = end
    return converted + formula[position:]


def _is_number(parsed: list[Any]) -> bool:
    """Whether a parsed answer is written as a number, so that nothing is left to compute."""
    value, text = (parsed[0], str(parsed[-1])) if parsed else (None, "")
    if isinstance(value, sympy.Eq) and value.lhs.is_Symbol:  # x = 42
        value = value.rhs
    if isinstance(value, sympy.Mul) and len(value.args) == 2:  # a number times a power of ten, or a percentage
        percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
        factors = [factor for factor in value.args if factor != percent and not _is_power_of_ten(factor)]
        if len(factors) < 2:
            value = factors[0] if factors else None
    fractions = [tuple(map(int, filter(None, pair))) for pair in _FRACTION.findall(text)]
    is_reduced = all(math.gcd(*pair) == 1 < pair[1] for pair in fractions)
    is_number = isinstance(value, sympy.Number) or _is_power_of_ten(value)
    return is_number and is_reduced and not _SEVERAL.search(_FRACTION.sub("", text))


def _result_of_equation(parsed: list[Any]) -> str:
    """What follows the last equals sign; empty for anything but an equation, or several of one value, that may hold."""
    value = parsed[0] if parsed else None
    equations = value.args if isinstance(value, sympy.And) else (value,)
    if not all(isinstance(equation, sympy.Eq) and equation.doit() != sympy.false for equation in equations):
        return ""
    return str(parsed[-1]).rpartition("=")[2]


def _is_power_of_ten(value: Any) -> bool:
    return isinstance(value, sympy.Pow) and value.base == 10 and isinstance(value.exp, sympy.Integer)


def _mark_answer(answer: str) -> str:
    """Box the answer of a text, so that math-verify reads all of it: of `6 - 5i` it would read 5.

    The answer is the last box, the whole text, or what follows "the answer is", if that is one formula, or a matrix at
    the end. A text without such an answer is returned as it is.
    """
    if (boxed := answer.rfind(r"\boxed")) >= 0:
        return _BOXED_PLAIN.sub(lambda match: rf"\boxed{{{_to_latex(match[1])}}}", answer[boxed:])
    text = answer.strip(' \n\t"“”').rstrip(".,;:")
    if _MARKED.search(text):
        return answer
    lower = text.lower()

    def text_after(phrases: tuple[str, ...]) -> str:
        """The text after the last of these phrases; all of it if there is none."""
        ends = [lower.rfind(phrase) + len(phrase) for phrase in phrases if phrase in lower]
        return text[max(ends, default=0) :]

    for candidate in (text, text_after(_ANSWER_PHRASES).strip(" :")):
        formula = _to_latex(candidate).replace(" or ", ", ")  # two answers do not equal one of them
        bare = _MATRIX.sub("0", formula)
        if len(bare) <= _MAX_BARE and _BARE.fullmatch(bare):
            return rf"\boxed{{{formula}}}"
    matrix = text_after(_RESULT_PHRASES).strip()
    return rf"\boxed{{{matrix}}}" if _MATRIX.fullmatch(matrix) else answer


def main(seconds: float, memory: int) -> None:
    """Reply to the frames on the standard input until it is closed."""
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    channel = PipeChannel(0, os.dup(1))
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)  # the output of libraries must not be read as a reply
    compare("1", "1")  # lazy imports do not count as time of the first answer
    channel.sendall(pack(DATA, b"ready"))
    while True:
        try:
            request = json.loads(receive(channel, NO_LIMIT)[1])
            signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal is not handled and ends the process
            reply = compare(**request)
        except (EOFError, MemoryError):
            return  # the judge has closed, or too little memory is left for the next answer
        except Exception:  # parsers fail on some texts
            reply = {"readable": True, "right": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.sendall(pack(DATA, json.dumps(reply).encode()))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
