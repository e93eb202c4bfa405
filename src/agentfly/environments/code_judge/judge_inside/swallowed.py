"""Checks of the tests that the solution keeps from counting.

An exception of the tests' code can end in the solution: a context manager's `__exit__` returns True, or the solution
catches what a function that it calls back raises. A test may want that (`with ignoring("KeyError"): raise KeyError`),
but never for a check: `is_failed_check` tells a failed assertion, and `skipped_check` finds the check that was not
reached because an exception was swallowed before it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

END = "__end_of_test__"
"""The name under which a decorated test function finds `report_end`."""
_trees: dict[str, ast.Module] = {}
"""The test code that was compiled, by file name."""
_decorated: set[str] = set()
"""The decorated test functions with checks: what the tests call by this name may be an object of the solution."""
_ended: set[str] = set()
"""Those of them that reached their end."""
_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef)
_Loop = (ast.For, ast.AsyncFor, ast.While)
_With = (ast.With, ast.AsyncWith)
_MOST_WORDS = 200


def compile_tests(source: str) -> Any:
    """Compile test code under a file name of its own, so that a traceback leads back to its syntax tree."""
    name = f"<tests {len(_trees)}>"
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, _Definition) and _is_decorated_test(node):
            _decorated.add(node.name)
            node.decorator_list.append(ast.Name(END, ast.Load()))
    source = ast.unparse(tree)  # one statement a line
    _trees[name] = ast.parse(source, name)
    return compile(source, name, "exec", 0, True)


def _is_decorated_test(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_test = node.name.startswith(("test", "check"))
    return is_test and bool(node.decorator_list) and any(_is_check(each) for each in _inside(node))


def report_end(function: Any) -> Any:
    """Decorate a test function: it reports that it reached its end."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if inspect.iscoroutine(value):
            return finish(value)
        _ended.add(function.__name__)
        return value

    async def finish(coroutine: Any) -> Any:
        value = await coroutine
        _ended.add(function.__name__)
        return value

    return run


def unfinished(source: str) -> str:
    """What is wrong if this step, which passed, calls a test function that never reached its end."""
    calls = (node.func for node in _inside(ast.parse(source)) if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    missing = sorted((called & _decorated) - _ended)
    return f"{missing[0]} did not reach its end: the solution's decorator did not run it" if missing else ""


def names(name: str) -> bool:
    """Whether the tests so far use a name, alone or as an attribute."""
    nodes = (node for tree in _trees.values() for node in ast.walk(tree))
    return any(name in (getattr(node, "id", None), getattr(node, "attr", None)) for node in nodes)


def is_failed_check(error: BaseException) -> bool:
    """Whether an exception is a failed assertion of the tests (`assert`, `self.assertEqual`, `pytest.fail`)."""
    if hasattr(error, "_of_solution"):
        return False
    return isinstance(error, AssertionError) or type(error).__module__ == "_pytest.outcomes"


def skipped_check(error: BaseException) -> str:
    """The check that was not reached because of an exception, if the solution swallows that now; empty if there is none
    or the tests mean the exception to be swallowed."""
    entries = [each for each in _walk(error.__traceback__) if each.tb_frame.f_code.co_filename in _trees]
    if not entries or _is_raised_by_test(error, entries[-1]):
        return ""
    return next((ast.unparse(check)[:_MOST_WORDS] for entry in entries for check in _checks_left(entry)), "")


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_raised_by_test(error: BaseException, last: TracebackType) -> bool:
    """Whether a `raise` statement of the tests raised it: then the test means it to be caught."""
    tree = _trees[last.tb_frame.f_code.co_filename]
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise) and _holds(node, last.tb_lineno))
    return not hasattr(error, "_of_solution") and any(raises)


def _checks_left(entry: TracebackType) -> Iterator[ast.AST]:
    """The checks that one frame of the tests did not complete: those of the `with` statement that is being left, or of
    the whole function where that is over."""
    frame, line = entry.tb_frame, entry.tb_lineno
    tree = _trees[frame.f_code.co_filename]
    scope = _left_with(tree, frame) if _is_running(frame) else _innermost_function(tree, line)
    if scope is None:
        return
    # A loop that was left would have come to all of its checks again.
    loops = [node.lineno for node in _inside(scope) if isinstance(node, _Loop) and _holds(node, line)]
    first = min([line, *loops])
    for node in _inside(scope):
        if getattr(node, "end_lineno", 0) >= first and _is_check(node):
            yield node


def _is_running(frame: FrameType) -> bool:
    at: FrameType | None = sys._getframe()
    while at is not None and at is not frame:
        at = at.f_back
    return at is frame


def _left_with(tree: ast.Module, frame: FrameType) -> ast.AST | None:
    """The `with` statement that a running frame is leaving: during `__exit__` a frame is at its line."""
    found = [node for node in ast.walk(tree) if isinstance(node, _With) and _is_head(node, frame.f_lineno)]
    return found[-1] if found else None


def _is_head(node: ast.With | ast.AsyncWith, line: int) -> bool:
    return node.lineno <= line <= max(each.context_expr.end_lineno or 0 for each in node.items)


def _innermost_function(tree: ast.Module, line: int) -> ast.AST | None:
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function) and _holds(node, line)]
    return max(functions, key=lambda node: (node.lineno, node.col_offset), default=None)


def _holds(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)


def _inside(scope: ast.AST) -> Iterator[Any]:
    """The nodes that run when a scope does: not those of the functions that it defines."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _Function):
            yield from _inside(child)


def _is_check(node: ast.AST) -> bool:
    """Whether a node is an assertion, or calls one. `assert False` is none: it marks what must not be reached."""
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and not node.test.value)
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", "")
    called = {each.id for each in (node.func, *node.args) if isinstance(each, ast.Name)}
    is_assertion = any(each.startswith("assert") for each in (name, *called))
    return is_assertion or any(map(_asserts, (function for each in called for function in _defined(each))))


def _defined(name: str) -> Iterator[ast.AST]:
    for tree in _trees.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, _Definition) and node.name == name)


def _asserts(function: ast.AST) -> bool:
    return any(isinstance(each, ast.Assert) for each in ast.walk(function))
