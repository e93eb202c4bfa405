"""Parses the tests of a dataset row: what runs in which order, what counts, which names the solution must define."""

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
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = (*_Function, ast.ClassDef)
_CANNOT_FAIL = (*_Definition, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)


@dataclass(frozen=True)
class Step:
    """A piece of test code that runs as one unit."""

    source: str
    counts: bool
    """Whether it is a test; otherwise it prepares the following tests."""

    @property
    def label(self) -> str:
        """The source on one line, shortened."""
        line = " ".join(self.source.split())
        return line if len(line) <= 100 else f"{line[:99]}…"


@dataclass(frozen=True)
class UnitTests:
    """Tests that can run against a solution."""

    steps: tuple[Step, ...]
    names: tuple[str, ...]
    """Names that the tests use and do not define."""
    modules: Mapping[str, str]
    """Modules that the tests use without an import, by the name they use."""

    @property
    def total(self) -> int:
        return sum(step.counts for step in self.steps)

    @classmethod
    def parse(cls, tests: str | Sequence[str], setup: str = "", entry_point: str | None = None) -> UnitTests:
        """Parse one text, or several texts that are a test each.

        In one text, every top-level assertion is a test, every function `test_…` without parameters, and, with an
        `entry_point`, the call `check(entry_point)`. Raises DataError if the tests are not valid.
        """
        if isinstance(tests, str):
            trees = [_parse(tests, "tests")]
        elif isinstance(tests, Sequence) and all(isinstance(test, str) for test in tests):
            trees = [_parse(test, f"tests[{number}]") for number, test in enumerate(tests)]
        else:
            raise DataError(f"tests must be a text or a list of texts, not {tests!r:.80}")
        setup_tree = _parse(setup, "setup")
        call = _parse(f"check({entry_point})", "entry_point") if entry_point else ast.Module([], [])
        steps = [Step(setup, False)] if setup.strip() else []
        for tree in trees:
            steps += _split_steps(tree, not isinstance(tests, str), entry_point)
        if not any(step.counts for step in steps):
            raise DataError(
                "tests holds no test: write assertions, functions test_…, or check(candidate) and entry_point"
            )
        names, modules = _find_names([setup_tree, *trees, call], entry_point)
        return cls(tuple(steps), names, modules)


def _parse(text: str, source: str) -> ast.Module:
    if not isinstance(text, str):
        raise DataError(f"{source} must be a text, not {text!r:.80}")
    try:
        tree = ast.parse(text)
        compile(tree, source, "exec", dont_inherit=True)
        return tree
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise DataError(f"{source}{line} is not valid Python: {getattr(error, 'msg', error)}") from error


def _split_steps(tree: ast.Module, is_one_test: bool, entry_point: str | None) -> Iterator[Step]:
    """Split a text into steps. `is_one_test`: the whole text is one test unless it defines test functions."""
    functions = {node.name: node for node in tree.body if isinstance(node, _Function)}
    test_functions = {name: node for name, node in functions.items() if name.startswith("test")}
    has_check = bool(entry_point) and "check" in functions
    if is_one_test and not test_functions and not has_check:
        yield Step(ast.unparse(tree), any(not isinstance(node, _CANNOT_FAIL) for node in tree.body))
        return
    called = set[str]()
    for node in tree.body:
        # A statement that only calls a function counts if the tests define the function.
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name))):
                pass
            case _:
                name = ""
        called.add(name)
        asserts = not isinstance(node, _Definition) and any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
        yield Step(ast.unparse(node), asserts or name in functions)
    for name, node in test_functions.items():
        if name in called:
            continue
        parameters = node.args
        if len(parameters.posonlyargs + parameters.args) > len(parameters.defaults) or None in parameters.kw_defaults:
            raise DataError(f"{name} takes arguments, and none are passed to it; a test function takes none")
        is_async = isinstance(node, ast.AsyncFunctionDef)
        yield Step(f"import asyncio; asyncio.run({name}())" if is_async else f"{name}()", True)
    if has_check and "check" not in called:
        yield Step(f"check({entry_point})", True)


def _find_names(trees: list[ast.Module], entry_point: str | None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Find the names that the tests take from the solution, and the modules that they use without an import."""

    def list_globals(table: symtable.SymbolTable) -> Iterator[str]:
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (is_module or symbol.is_global()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from list_globals(child)

    tables = [symtable.symtable(ast.unparse(tree), "tests", "exec") for tree in trees]
    symbols = [symbol for table in tables for symbol in table.get_symbols()]
    defined = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    used = {name for table in tables for name in list_globals(table)} - defined
    nodes = [node for tree in trees for node in ast.walk(tree)]
    # The `math` of `math.pi`
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = {name: _ALIASES.get(name, name) for name in used & bases if name in {*sys.stdlib_module_names, *_ALIASES}}
    names = used - modules.keys() - _BUILTINS
    # A solution must not replace the tests' `sorted`. But if the tests use nothing else, its `sum` is what they test.
    names |= {entry_point} if entry_point else set() if names else used & _BUILTINS
    return tuple(sorted(names)), modules
