"""Checks that text can be evaluated as Python safely.

Some scorers of other packages evaluate a model's answer. Only lists, names and small arithmetic expressions may reach
them: no attribute access, no calls but a few functions, no huge results.
"""

from __future__ import annotations

import ast

FUNCTIONS = frozenset(
    {"Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "log", "sin", "sinh", "sqrt", "tan", "tanh"}
)
MAX_SIZE = 100
"""Maximum exponent, and maximum length of a number or string in characters."""
MAX_CALL_DEPTH = 2
"""Nested calls: exp(exp(exp(9))) cannot be computed."""
_ALLOWED = (
    ast.Expression, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub,
    ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Call, ast.Name, ast.Constant,
)  # fmt: skip


def is_safe_expression(text: str) -> bool:
    """Whether the text is a plain expression, or not Python and without special characters."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        # Some evaluators accept more than Python: sympy's takes `5!`, for example.
        return not any(sign in text for sign in "*!(.=:@`\\")
    except (ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _ALLOWED) and _is_safe_node(node) for node in ast.walk(tree))


def _is_safe_node(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS and _call_depth(node) <= MAX_CALL_DEPTH
        case ast.Call():
            return False
        case ast.Name(id=name):
            return "__" not in name
        case ast.Constant(value=value):
            return isinstance(value, int | float | str) and len(str(value)) <= MAX_SIZE
        case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
            nested = any(isinstance(each, ast.Pow) for each in (*ast.walk(base), *ast.walk(exponent)))
            return not nested and all(map(_is_exponent, ast.walk(exponent)))
        case ast.BinOp(op=ast.Mult(), left=left, right=right):
            return not any(isinstance(side, ast.List | ast.Tuple) or _is_string(side) for side in (left, right))
    return True


def _call_depth(node: ast.AST) -> int:
    inner = max((_call_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, ast.Call)


def _is_exponent(node: ast.AST) -> bool:
    """Whether the node may be part of an exponent: no call, no large number."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and abs(node.value) <= MAX_SIZE
    return not isinstance(node, ast.Call)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
