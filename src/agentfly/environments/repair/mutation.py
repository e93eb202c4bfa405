"""Bugs of one line: a comparison, an operator, a value, a condition, a call or a return that is wrong, or missing.

They are made in the text of a source file, so all other lines stay as they were written.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

_COMPARISONS = {
    ast.Lt: ("<", "<=", ">"), ast.LtE: ("<=", "<", ">="), ast.Gt: (">", ">=", "<"), ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!=", "<="), ast.NotEq: ("!=", "==", "<"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"),
}  # fmt: skip
_BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}
_TWENTIETHS = {"train": range(13), "validation": range(13, 17), "test": range(17, 20)}

Edit = tuple[str, int, int, int, str]
"""Kind, line, first and last column, and what is put there instead."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A line that became wrong."""

    path: str
    line: int
    kind: str
    before: str
    """The line as it should be."""
    after: str
    """The line with the bug."""

    def applied(self, text: str) -> str:
        """The file with the bug in it."""
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        return "\n".join(lines)

    @property
    def name(self) -> str:
        """Where it is, and a mark that only this bug has."""
        mark = hashlib.sha256(f"{self.path}/{self.line}/{self.after}".encode()).hexdigest()
        return f"{self.path}:{self.line}/{mark[:8]}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def is_in(self, split: str, package: str) -> bool:
        """Whether it belongs to a split. All bugs of one line do, so a line to be repaired is in one split only."""
        mark = hashlib.sha256(f"{package}/{self.path}: {self.before.strip()}".encode()).digest()
        return int.from_bytes(mark[:8], "big") % 20 in _TWENTIETHS[split]


def mutations(path: str, text: str) -> Iterator[Mutation]:
    """Every bug that can be put into a source file, in the order of its lines."""
    lines, seen = text.split("\n"), set()
    edits = sorted((edit for node in ast.walk(ast.parse(text)) for edit in _edits(node, lines)), key=lambda e: e[1:])
    for kind, line, start, end, instead in edits:
        before = lines[line - 1]
        after = before[:start] + instead + before[end:]
        if after == before or (line, after) in seen:
            continue
        seen.add((line, after))
        mutation = Mutation(path, line, kind, before, after)
        if _compiles(mutation.applied(text)):
            yield mutation


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutated", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _edits(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    match node:
        case ast.Compare():
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from _between("comparison", left, right, _COMPARISONS.get(type(op)), lines)
        case ast.BinOp():
            yield from _between("arithmetic", node.left, node.right, _ARITHMETIC.get(type(node.op)), lines)
        case ast.AugAssign():
            yield from _between("arithmetic", node.target, node.value, _ARITHMETIC.get(type(node.op)), lines)
        case ast.BoolOp():
            yield from _between("boolean", node.values[0], node.values[1], _BOOLEAN[type(node.op)], lines)
        case ast.Constant() if type(node.value) is bool:
            yield from _replaced("constant", node, _OPPOSITES[str(node.value)], lines)
        case ast.Name() if node.id in _OPPOSITES:
            yield from _replaced("function", node, _OPPOSITES[node.id], lines)
        case ast.Constant() if type(node.value) is int:
            yield from _replaced("constant", node, f"{node.value + 1}", lines)
            if node.value > 0:
                yield from _replaced("constant", node, f"{node.value - 1}", lines)
        case ast.If() | ast.IfExp():
            yield from _negated(node.test, lines)
        case ast.Call(args=[first, second, *_]):
            yield from _swapped(first, second, lines)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield from _replaced("return", value, "None", lines)
    if isinstance(node, ast.stmt) and _can_be_missing(node):
        yield from _replaced("missing", node, "pass", lines)


def _can_be_missing(node: ast.stmt) -> bool:
    """Whether what follows still has its names without a statement."""
    match node:
        case ast.AugAssign() | ast.Delete() | ast.Break() | ast.Expr(value=ast.Call()):
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
    return False


def _is_plain(lines: list[str], *nodes: ast.expr | ast.stmt) -> bool:
    """Whether nodes are all on one line, whose columns are characters."""
    numbers = {number for node in nodes for number in (node.lineno, node.end_lineno)}
    return len(numbers) == 1 and lines[nodes[0].lineno - 1].isascii()


def _between(
    kind: str, left: ast.expr, right: ast.expr, words: tuple[str, ...] | None, lines: list[str]
) -> Iterator[Edit]:
    """Another operator between two operands."""
    if words is None or not _is_plain(lines, left, right):
        return
    start, end = left.end_col_offset or 0, right.col_offset
    text = lines[left.lineno - 1][start:end]
    old, *others = words
    if found := re.search(rf"\b{old}\b" if old.isalpha() else re.escape(old), text):
        for new in others:
            yield kind, left.lineno, start + found.start(), start + found.end(), new


def _replaced(kind: str, node: ast.expr | ast.stmt, instead: str, lines: list[str]) -> Iterator[Edit]:
    if _is_plain(lines, node):
        yield kind, node.lineno, node.col_offset, node.end_col_offset or 0, instead


def _negated(test: ast.expr, lines: list[str]) -> Iterator[Edit]:
    if not _is_plain(lines, test):
        return
    text = lines[test.lineno - 1][test.col_offset : test.end_col_offset]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        instead = text.removeprefix("not").lstrip()
    else:
        instead = f"not {text}" if isinstance(test, ast.Name | ast.Call | ast.Attribute) else f"not ({text})"
    yield from _replaced("condition", test, instead, lines)


def _swapped(first: ast.expr, second: ast.expr, lines: list[str]) -> Iterator[Edit]:
    if _is_plain(lines, first, second) and not isinstance(first, ast.Starred | ast.GeneratorExp):
        line = lines[first.lineno - 1]
        texts = [line[each.col_offset : each.end_col_offset] for each in (first, second)]
        middle = line[first.end_col_offset : second.col_offset]
        yield "arguments", first.lineno, first.col_offset, second.end_col_offset or 0, texts[1] + middle + texts[0]
