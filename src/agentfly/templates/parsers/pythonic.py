"""Parsers for calls written as Python: `[f(a=1, b="x"), g()]`.

Calls are parsed with `ast` and never evaluated: arguments are keyword arguments with literals that JSON can hold.

    llama-pythonic   the list alone at the start of a line, after <|python_tag|>, or in <|python_start|>…<|python_end|>
    lfm2             the list in <|tool_call_start|>…<|tool_call_end|>; `true`, `false` and `null` are constants and a
                     string may span lines, because the templates write objects as JSON and line breaks as they are
"""

from __future__ import annotations

import ast
import math
import re
import warnings
from collections.abc import Mapping

from agentfly.templates.parsers.calls import find_storage_error
from agentfly.templates.parsers.turn import BlockParser, CallBlock
from agentfly.types import ToolCall

PYTHON_EXAMPLE = '[NAME(key=1, other="text")]'
PYTHON_LIST = r"^[ \t]*(?=\[\s*[A-Za-z_][\w.]*\()"
_NAME = re.compile(r"[\s\[]*([A-Za-z_][\w.]*)\s*\(")
_WARNS = re.compile(r"\\|\d[^\W\d]")
"""Source that makes `ast.parse` emit warnings: unknown escapes, and a number directly followed by a word."""

FENCE = CallBlock("```", "```", lambda body: None)
"""A code block in the answer; never a call."""
_NO_CONSTANTS: Mapping[str, object] = {}


def parse_python_calls(body: str, constants: Mapping[str, object] = _NO_CONSTANTS) -> list[ToolCall]:
    """Parse one or more expressions, each a call or a list of calls. `constants` maps names to their values."""
    try:
        source = body.strip()
        if _WARNS.search(source):
            with warnings.catch_warnings():  # the user cannot act on warnings about model output
                warnings.simplefilter("ignore")
                statements = ast.parse(source).body
        else:
            statements = ast.parse(source).body
    except SyntaxError as error:
        return [_invalid_python(body, f"{error.msg}, line {error.lineno}, column {error.offset}")]
    except (ValueError, RecursionError, MemoryError) as error:
        return [_invalid_python(body, str(error) or "it is nested too deeply")]
    calls: list[ToolCall] = []
    for statement in statements:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        nodes = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        calls += [_convert_call(node, constants) for node in nodes]
    return calls or [ToolCall("", problem="it holds no call")]


def _invalid_python(body: str, error: str) -> ToolCall:
    name_match = _NAME.match(body)
    return ToolCall(name_match[1] if name_match else "", problem=f"it is not Python: {error}")


def _convert_call(node: ast.AST, constants: Mapping[str, object]) -> ToolCall:
    if not isinstance(node, ast.Call):
        return ToolCall("", problem="it is not a function call")
    attributes: list[str] = []
    function = node.func
    while isinstance(function, ast.Attribute):
        attributes.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        return ToolCall("", problem="it has no readable name")
    name = ".".join([function.id, *reversed(attributes)])
    arguments: dict[str, object] = {}
    problem = "its arguments must be named" if node.args else ""
    for keyword in node.keywords:
        if keyword.arg is None:
            problem = "its arguments must be named"
        elif keyword.arg in arguments:
            problem = f"its argument {keyword.arg:.40} is given twice"
        else:
            try:
                arguments[keyword.arg] = _convert_literal(keyword.value, constants)
            except ValueError as error:
                problem = f"its argument {keyword.arg:.40} is {error}"
    if storage_error := find_storage_error(arguments):
        return ToolCall(name, problem=f"its arguments cannot be read: {storage_error}")
    return ToolCall(name, arguments, problem=problem)


def _convert_literal(node: ast.expr, constants: Mapping[str, object]) -> object:
    """Return the value of a literal that JSON can hold; raise ValueError with what it is instead."""
    match node:
        case ast.Constant(value=None | bool() | str() | int() as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            if math.isfinite(number):
                return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_convert_literal(item, constants) for item in items]
        case ast.Dict(keys=keys, values=values):
            converted: dict[str, object] = {}
            for key, item in zip(keys, values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                    raise ValueError("a dictionary with a key that is not a string")
                converted[key.value] = _convert_literal(item, constants)
            return converted
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.Name(id=name):
            raise ValueError(f"the name {name:.40}; write text in quotes, and True, False or None")
    raise ValueError("no literal that JSON has too")


parse_llama_pythonic = BlockParser(
    FENCE,
    CallBlock(r"<\|python_tag\|>", "", parse_python_calls, PYTHON_EXAMPLE),
    CallBlock(
        r"<\|python_start\|>", "<|python_end|>", parse_python_calls, f"<|python_start|>{PYTHON_EXAMPLE}<|python_end|>"
    ),
    CallBlock(PYTHON_LIST, None, parse_python_calls, PYTHON_EXAMPLE),
    stray=r"<\|python_end\|>",
    hint="[<",
)

_LFM2_START = "<|tool_call_start|>"
_LFM2_END = "<|tool_call_end|>"
_JSON_CONSTANTS = {"true": True, "false": False, "null": None}
_QUOTE_OR_BREAK = re.compile(r"""\\.|['"\n\r]""", re.DOTALL)


def _parse_lfm2_call(body: str) -> list[ToolCall]:
    return parse_python_calls(_escape_breaks(body) if "\n" in body or "\r" in body else body, _JSON_CONSTANTS)


def _escape_breaks(source: str) -> str:
    """Replace line breaks inside string literals by escapes."""
    quote = ""

    def escape(token: re.Match[str]) -> str:
        nonlocal quote
        piece = token[0]
        if piece in ("\n", "\r"):
            return repr(piece)[1:-1] if quote else piece
        if piece in ("'", '"') and quote in ("", piece):
            quote = "" if quote else piece
        return piece

    return _QUOTE_OR_BREAK.sub(escape, source)


parse_lfm2 = BlockParser(
    CallBlock(re.escape(_LFM2_START), _LFM2_END, _parse_lfm2_call, f"{_LFM2_START}{PYTHON_EXAMPLE}{_LFM2_END}"),
    stray=re.escape(_LFM2_END),
)
