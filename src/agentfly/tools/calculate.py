"""Arithmetic, evaluated without `eval`: only numbers, operators and the functions named here exist."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from agentfly.tooling import tool

_LARGEST = 20_000
"""Bits of the largest whole number worked out; anything larger would hang the machine, not answer a question."""
_LONGEST = 10_000
"""Characters of an expression that is read."""


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and abs(exponent) * max(base.bit_length(), 1) > _LARGEST:
        raise ValueError("the power is too large to work out")
    result: float = base**exponent
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return result


def _round(number: float, digits: int = 0) -> float:
    if abs(digits) > _LARGEST:
        raise ValueError("that is too many digits to round to")
    return round(number, digits) if digits else round(number)


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
    "ceil": math.ceil, "gcd": math.gcd, "lcm": math.lcm,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


@tool
async def calculate(expression: str) -> str:
    """Work out an arithmetic expression, such as `(2 + 3) * 4 ** 2` or `sqrt(2)`.

    Args:
        expression: Numbers, the operators + - * / // % **, brackets, and functions such as sqrt, log, round, min, max.
    """
    if len(expression) > _LONGEST:
        return f"Error: the expression has {len(expression)} characters; at most {_LONGEST} are read."
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        value = _evaluate(tree.body)
        return f"{value:.15g}" if isinstance(value, float) else str(value)
    except SyntaxError as error:
        return f"Error: {expression!r:.200} is not an arithmetic expression: {error.msg}."
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        return f"Error: {expression!r:.200} cannot be worked out: {error}."


calculator = calculate


def _evaluate(node: ast.AST) -> Any:
    value = _value(node)
    if isinstance(value, int) and value.bit_length() > _LARGEST:
        raise ValueError("a number on the way is too large to work out")
    return value


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_evaluate, args))
    known = ", ".join([*_FUNCTIONS, *_CONSTANTS])
    raise ValueError(f"{ast.unparse(node)!r} is not allowed; there are numbers, + - * / // % ** and {known}")
