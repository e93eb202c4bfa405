"""Llama's Python form: `[f(a=1, b="x"), g()]`.

Read with `ast` and never evaluated: arguments are literals, by name, of kinds that JSON has too.
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Mapping

from agentfly.templates.readers.calls import unkeepable
from agentfly.templates.readers.turn import Block, Turn
from agentfly.types import ToolCall

EXAMPLE = '[NAME(key=1, other="text")]'
BARE = r"^[ \t]*(?=\[\s*[A-Za-z_][\w.]*\()"
_NAME = re.compile(r"[\s\[]*([A-Za-z_][\w.]*)\s*\(")
_WARNS = re.compile(r"\\|\d[^\W\d]")
"""What Python warns of while it parses: unknown escapes, and a number that runs into a word."""

FENCE = Block("```", "```", lambda body: None)
"""A block of code in the answer: whatever it holds, it is no call."""


_NO_CONSTANTS: Mapping[str, object] = {}


def read_python(body: str, constants: Mapping[str, object] = _NO_CONSTANTS) -> list[ToolCall]:
    """Read calls: one or more expressions, each a call or a list of calls. `constants` are names with a value."""
    try:
        statements = _parse(body.strip()).body
    except SyntaxError as error:
        return [_broken(body, f"{error.msg}, line {error.lineno}, column {error.offset}")]
    except (ValueError, RecursionError, MemoryError) as error:
        return [_broken(body, str(error) or "it is nested too deeply")]
    calls: list[ToolCall] = []
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        nodes = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        calls += [_call(node, constants) for node in nodes]
    return calls or [ToolCall("", problem="it holds no call")]


def _parse(source: str) -> ast.Module:
    if not _WARNS.search(source):
        return ast.parse(source)
    with warnings.catch_warnings():  # how a model writes Python is nothing to warn the user of
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _broken(body: str, wrong: str) -> ToolCall:
    found = _NAME.match(body)
    return ToolCall(found[1] if found else "", problem=f"it is not Python: {wrong}")


def _call(node: ast.AST, constants: Mapping[str, object]) -> ToolCall:
    if not isinstance(node, ast.Call):
        return ToolCall("", problem="it is not a function call")
    name = _dotted(node.func)
    if not name:
        return ToolCall("", problem="it has no readable name")
    arguments: dict[str, object] = {}
    problem = "its arguments must be named" if node.args else ""
    for keyword in node.keywords:
        if keyword.arg is None:
            problem = "its arguments must be named"
        elif keyword.arg in arguments:
            problem = f"its argument {keyword.arg:.40} is given twice"
        else:
            try:
                arguments[keyword.arg] = _literal(keyword.value, constants)
            except ValueError as error:
                problem = f"its argument {keyword.arg:.40} is {error}"
    wrong = unkeepable(arguments)
    if wrong:
        return ToolCall(name, problem=f"its arguments cannot be read: {wrong}")
    return ToolCall(name, arguments, problem=problem)


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _literal(node: ast.expr, constants: Mapping[str, object]) -> object:
    """The value of a literal that JSON can hold; ValueError says what stands there instead."""
    match node:
        case ast.Constant(value=None | bool() | str() | int() as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            if math.isfinite(number):
                return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, constants) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value, constants) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.Name(id=name):
            raise ValueError(f"the name {name:.40}; write text in quotes, and True, False or None")
    raise ValueError("no literal that JSON has too")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a dictionary with a key that is no string")


read = Turn(
    FENCE,
    Block(r"<\|python_tag\|>", "", read_python, EXAMPLE),
    Block(r"<\|python_start\|>", "<|python_end|>", read_python, f"<|python_start|>{EXAMPLE}<|python_end|>"),
    Block(BARE, None, read_python, EXAMPLE),
    stray=r"<\|python_end\|>",
    hint="[<",
)
