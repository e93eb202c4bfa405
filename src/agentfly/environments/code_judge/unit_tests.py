"""The tests of a data set, read: what runs in which order, what counts, and which names the solution must give."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentfly.errors import DataError

_ALIASES = {"np": "numpy", "numpy": "numpy", "sympy": "sympy"}
_BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_NOTHING_TO_FAIL = (*_Definition, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


@dataclass(frozen=True)
class Step:
    """A piece of the tests that is run at once."""

    source: str
    counts: bool
    """Whether it is a test; else it prepares those after it."""

    @property
    def label(self) -> str:
        """The test, on one line."""
        line = " ".join(self.source.split())
        return line if len(line) <= 100 else f"{line[:99]}…"


@dataclass(frozen=True)
class UnitTests:
    """Tests that can be run against a solution."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]
    """What they use and do not define: the solution must."""
    modules: Mapping[str, str]
    """Modules that they use without an import, by the name they use."""

    @property
    def total(self) -> int:
        return sum(step.counts for step in self.steps)

    @classmethod
    def of(cls, tests: str | Sequence[str], setup: str = "", entry_point: str | None = None) -> UnitTests:
        """Read them: one text, or several that are a test each; DataError names what is wrong with them.

        In a text every assertion counts, every function `test_…` that takes nothing, and with an `entry_point` the call
        `check(entry_point)`.
        """
        if isinstance(tests, str):
            parsed = {"tests": _parse(tests, "tests")}
        elif isinstance(tests, Sequence) and all(isinstance(each, str) for each in tests):
            parsed = {f"tests[{number}]": _parse(each, f"tests[{number}]") for number, each in enumerate(tests)}
        else:
            raise DataError(f"tests must be a text or a list of texts, not {tests!r:.80}")
        prepared = _parse(setup, "setup")
        call = _parse(f"check({entry_point})", "entry_point") if entry_point else ast.Module([], [])
        steps = [Step(setup, False)] if setup.strip() else []
        for tree in parsed.values():
            steps += _steps(tree, not isinstance(tests, str), entry_point)
        if not any(step.counts for step in steps):
            raise DataError(
                "tests holds no test: write assertions, functions test_…, or check(candidate) and entry_point"
            )
        names, modules = _wanted([prepared, *parsed.values(), call], entry_point)
        return cls(tuple(steps), names, modules)


def _parse(text: str, place: str) -> ast.Module:
    if not isinstance(text, str):
        raise DataError(f"{place} must be a text, not {text!r:.80}")
    try:
        tree = ast.parse(text)
        compile(tree, place, "exec", dont_inherit=True)
        return tree
    except (SyntaxError, ValueError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise DataError(f"{place}{where} is no Python: {getattr(error, 'msg', error)}") from error


def _steps(tree: ast.Module, is_one: bool, entry_point: str | None) -> Iterator[Step]:
    """The steps of one text; `is_one` where all of it is a single test unless it defines some."""
    defined = {node.name: node for node in tree.body if isinstance(node, _Function)}
    tested = {name: node for name, node in defined.items() if name.startswith("test")}
    checked = entry_point if "check" in defined else None
    if is_one and not tested and not checked:
        yield Step(ast.unparse(tree), any(not isinstance(node, _NOTHING_TO_FAIL) for node in tree.body))
        return
    called = set()
    for node in tree.body:
        name = _called(node)
        called.add(name)
        asserts = not isinstance(node, _Definition) and any(isinstance(each, ast.Assert) for each in ast.walk(node))
        yield Step(ast.unparse(node), asserts or name in defined)
    for name, function in tested.items():
        if name not in called:
            yield _call(name, function)
    if checked and "check" not in called:
        yield Step(f"check({checked})", True)


def _called(node: ast.stmt) -> str | None:
    """The name that a statement does nothing but call."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
        return node.value.func.id
    return None


def _call(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Step:
    given = function.args
    if len(given.posonlyargs + given.args) > len(given.defaults) or None in given.kw_defaults:
        raise DataError(f"{name} takes arguments that nobody gives it; a test function takes none")
    is_async = isinstance(function, ast.AsyncFunctionDef)
    return Step(f"import asyncio; asyncio.run({name}())" if is_async else f"{name}()", True)


def _wanted(trees: list[ast.Module], entry_point: str | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names that the tests take from the solution, and the modules they use without an import."""
    tables = [symtable.symtable(ast.unparse(tree), "tests", "exec") for tree in trees]
    defined = {name.get_name() for table in tables for name in table.get_symbols() if _binds(name)}
    used = {name for table in tables for name in _globals(table)} - defined
    bases = {name for tree in trees for node in ast.walk(tree) if (name := _base(node))}
    modules = {name: _ALIASES.get(name, name) for name in used & bases if name in {*sys.stdlib_module_names, *_ALIASES}}
    names = used - modules.keys() - _BUILTINS
    # A solution may not put its own `sorted` under the tests; where nothing else is tested, its `sum` is what is meant.
    names |= {entry_point} if entry_point else set() if names else used & _BUILTINS
    return tuple(sorted(names)), modules


def _binds(symbol: symtable.Symbol) -> bool:
    return symbol.is_assigned() or symbol.is_imported()


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)


def _base(node: ast.AST) -> str | None:
    """The `math` of `math.pi`."""
    return node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else None
