"""Mutation of Python source: bugs of one line, as in mutation testing.

A mutation changes an operator, a constant, a condition, a call or a return value, or removes a statement. It is made in
the text of the file, so all other lines keep their formatting.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS = {
    ast.Lt: ("<", "<=", ">"), ast.LtE: ("<=", "<", ">="), ast.Gt: (">", ">=", "<"), ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!=", "<="), ast.NotEq: ("!=", "==", "<"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
"""Each operator as it is written, and its replacements."""
_ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"),
}  # fmt: skip
_BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}
_TWENTIETHS = {"train": range(13), "validation": range(13, 17), "test": range(17, 20)}
"""Twentieths of all source lines in each split."""

Edit = tuple[str, int, int, int, str]
"""Kind, line, first column, last column, replacement text."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug in one line of a source file."""

    path: str
    line: int
    kind: str
    before: str
    """The correct line."""
    after: str
    """The line with the bug."""

    def apply(self, text: str) -> str:
        """Return the source file with the bug."""
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        return "\n".join(lines)

    @property
    def name(self) -> str:
        """Path, line, and a hash that distinguishes the bugs of one line."""
        digest = hashlib.sha256(f"{self.path}/{self.line}/{self.after}".encode()).hexdigest()
        return f"{self.path}:{self.line}/{digest[:8]}"

    def is_in(self, split: str, package: str) -> bool:
        """Whether the mutation belongs to a split. The correct line decides: a line is mutated in one split only."""
        digest = hashlib.sha256(f"{package}/{self.path}: {self.before.strip()}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % 20 in _TWENTIETHS[split]


def mutations(path: str, text: str) -> Iterator[Mutation]:
    """Yield every mutation of a source file that compiles, in line order."""
    lines = text.split("\n")
    edits = [edit for node in ast.walk(ast.parse(text)) for edit in _edits(node, lines)]
    seen = set[tuple[int, str]]()
    for kind, line, start, end, replacement in sorted(edits, key=lambda edit: edit[1:]):
        before = lines[line - 1]
        after = before[:start] + replacement + before[end:]
        if after == before or (line, after) in seen:
            continue
        seen.add((line, after))
        mutation = Mutation(path, line, kind, before, after)
        try:
            compile(mutation.apply(text), "mutated", "exec", dont_inherit=True)
        except SyntaxError:
            continue
        yield mutation


def _edits(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    """Yield the edits of one syntax node."""

    def source(first: ast.expr, last: ast.expr) -> str:
        return lines[first.lineno - 1][first.col_offset : last.end_col_offset]

    def replace(kind: str, first: ast.expr | ast.stmt, text: str, last: ast.expr | None = None) -> Iterator[Edit]:
        """Replace the source from one node to another."""
        last_node = last or first
        if _are_on_one_line(lines, first, last_node):
            yield kind, first.lineno, first.col_offset, last_node.end_col_offset or 0, text

    def replace_operator(kind: str, left: ast.expr, right: ast.expr, words: tuple[str, ...] | None) -> Iterator[Edit]:
        if words is None or not _are_on_one_line(lines, left, right):
            return
        start = left.end_col_offset or 0
        old, *others = words
        between = lines[left.lineno - 1][start : right.col_offset]
        if found := re.search(rf"\b{old}\b" if old.isalpha() else re.escape(old), between):
            for new in others:
                yield kind, left.lineno, start + found.start(), start + found.end(), new

    match node:
        case ast.Compare():
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                yield from replace_operator("comparison", left, right, _COMPARISONS.get(type(op)))
        case ast.BinOp():
            yield from replace_operator("arithmetic", node.left, node.right, _ARITHMETIC.get(type(node.op)))
        case ast.AugAssign():
            yield from replace_operator("arithmetic", node.target, node.value, _ARITHMETIC.get(type(node.op)))
        case ast.BoolOp():
            yield from replace_operator("boolean", node.values[0], node.values[1], _BOOLEAN[type(node.op)])
        case ast.Constant() if type(node.value) is bool:
            yield from replace("constant", node, _OPPOSITES[str(node.value)])
        case ast.Name() if node.id in _OPPOSITES:
            yield from replace("function", node, _OPPOSITES[node.id])
        case ast.Constant() if type(node.value) is int:
            yield from replace("constant", node, f"{node.value + 1}")
            if node.value > 0:
                yield from replace("constant", node, f"{node.value - 1}")
        case ast.If(test=test) | ast.IfExp(test=test):
            text = source(test, test)
            if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
                negated = text.removeprefix("not").lstrip()
            else:
                negated = f"not {text}" if isinstance(test, ast.Name | ast.Call | ast.Attribute) else f"not ({text})"
            yield from replace("condition", test, negated)
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred | ast.GeneratorExp):
            middle = lines[first.lineno - 1][first.end_col_offset : second.col_offset]
            yield from replace("arguments", first, source(second, second) + middle + source(first, first), second)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield from replace("return", value, "None")
    match node:  # statements without which later statements still have their names
        case (
            ast.AugAssign()
            | ast.Delete()
            | ast.Break()
            | ast.Expr(value=ast.Call())
            | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
        ):
            yield from replace("missing", node, "pass")


def _are_on_one_line(lines: list[str], *nodes: ast.expr | ast.stmt) -> bool:
    """Whether nodes are on one line of ASCII, where the byte offsets of the syntax tree are character offsets."""
    numbers = {number for node in nodes for number in (node.lineno, node.end_lineno)}
    return len(numbers) == 1 and lines[nodes[0].lineno - 1].isascii()
