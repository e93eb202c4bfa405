"""The general tools: `calculate`, and tools that give the final answer and end the chain.

Arithmetic works without `eval`: only numbers, operators and the functions listed here are evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from agentfly.tooling import TOOLS, tool

_MAX_BITS = 20_000
"""Maximum bits of an integer, also of intermediate results: larger ones would take too much time and memory."""
_MAX_LENGTH = 10_000
"""Maximum characters of an expression."""
_MAX_ANSWER = 100_000
"""Maximum characters of a final answer."""


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * max(base.bit_length(), 1) > _MAX_BITS:
        raise ValueError("the power is too large to work out")
    result: float = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return result


def _round(number: float, digits: int = 0) -> float:
    if abs(digits) > _MAX_BITS:
        raise ValueError("that is too many digits to round to")
    return round(number, digits) if digits else round(number)


def _lcm(*numbers: int) -> int:
    result = 1
    for number in numbers:
        result = math.lcm(result, number)
        if result.bit_length() > _MAX_BITS:  # math.lcm of many large numbers would take seconds
            raise ValueError("a number on the way is too large to work out")
    return result


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt, "exp": math.exp, "log": math.log,
    "log2": math.log2, "log10": math.log10, "sin": math.sin, "cos": math.cos, "tan": math.tan, "floor": math.floor,
    "ceil": math.ceil, "gcd": math.gcd, "lcm": _lcm,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


@tool
async def calculate(expression: str) -> str:
    """Work out an arithmetic expression, such as `(2 + 3) * 4 ** 2` or `sqrt(2)`.

    Args:
        expression: Numbers, the operators + - * / // % **, brackets, and functions such as sqrt, log, round, min, max.
    """
    if len(expression) > _MAX_LENGTH:
        return f"Error: the expression has {len(expression)} characters; at most {_MAX_LENGTH} are read."
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _evaluate(tree.body)
        return f"{value:.15g}" if isinstance(value, float) else str(value)
    except SyntaxError as error:
        return f"Error: {expression!r:.200} is not an arithmetic expression: {error.msg}."
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return f"Error: {expression!r:.200} cannot be worked out: {error}."


calculator = calculate
"""Another name of `calculate`."""
TOOLS.add(calculate, "calculator")


def _evaluate(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.Name(id=name) if name in _CONSTANTS:
            value = _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            value = _FUNCTIONS[name](*map(_evaluate, args))
        case _:
            names = ", ".join([*_FUNCTIONS, *_CONSTANTS])
            raise ValueError(f"{ast.unparse(node)!r} is not allowed; there are numbers, + - * / // % ** and {names}")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("a number on the way is too large to work out")
    return value


@tool(ends_chain=True, max_length=_MAX_ANSWER)
async def answer(answer: str) -> str:
    """Give the final answer. Nothing can be done after it.

    Args:
        answer: The final answer, and nothing else.
    """
    return answer


@tool(ends_chain=True, max_length=_MAX_ANSWER)
async def answer_qa(answer: str) -> str:
    """Give the final answer to the question. Nothing can be done after it.

    Args:
        answer: The answer in as few words as there are: a name, a date, a number, yes or no; no sentence around it.
    """
    return answer


@tool(ends_chain=True, max_length=_MAX_ANSWER)
async def answer_math(answer: str) -> str:
    """Give the final result of the problem. Nothing can be done after it.

    Args:
        answer: The result alone: a number or an expression, in LaTeX or plain; no words, and no unit unless asked for.
    """
    return answer
