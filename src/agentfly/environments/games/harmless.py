"""Whether text can be evaluated as Python without doing anything but a little arithmetic.

Some scorers of other packages evaluate what a model wrote. That is let through to them only if it is a list, a name or
a sum; nothing that calls, looks up or multiplies itself beyond measure.
"""

from __future__ import annotations

import ast

FUNCTIONS = frozenset(
    {"Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "log", "sin", "sinh", "sqrt", "tan", "tanh"}
)
LARGEST = 100
"""The largest exponent, and the most characters of a number or a text in it."""
DEEPEST = 2
"""Functions within functions: the exponential of the exponential of one is more than can be computed."""
_PLAIN = (
    ast.Expression, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub,
    ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Call, ast.Name, ast.Constant,
)  # fmt: skip


def is_harmless(text: str) -> bool:
    """Whether it is a plain expression; also where it is no Python at all."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return not _is_odd(text)
    except (ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _PLAIN) and _is_small(node) for node in ast.walk(tree))


def _is_small(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS and _depth(node) <= DEEPEST
        case ast.Call():
            return False
        case ast.Name(id=name):
            return "__" not in name
        case ast.Constant(value=value):
            return isinstance(value, int | float | str) and len(str(value)) <= LARGEST
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            nested = any(isinstance(each, ast.Pow) for each in (*ast.walk(base), *ast.walk(exponent)))
            return not nested and all(map(_is_exponent, ast.walk(exponent)))
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return not any(isinstance(side, ast.List | ast.Tuple) or _is_text(side) for side in (left, right))
    return True


def _depth(node: ast.AST) -> int:
    inner = max((_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.Call)


def _is_exponent(node: ast.AST) -> bool:
    """Whether it may be part of an exponent: no call, no large number."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and abs(node.value) <= LARGEST
    return not isinstance(node, ast.Call)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_odd(text: str) -> bool:
    """Whether a reader that is more lenient than Python might make more of it: sympy's takes `5!`, for one."""
    return any(sign in text for sign in "*!(.=:@`\\")
