"""Checks of the tests that the solution keeps from counting.

An exception of the tests' code can end in the solution: a context manager's `__exit__` returns True, or the solution
catches the exception of a function that it calls back. A test may expect that (`with ignoring("KeyError"): raise
KeyError`), but never for a check: `is_failed_check` recognizes a failed assertion, and `find_skipped_check` finds the
check that was not reached because an exception was swallowed before it.
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
"""Syntax trees of the compiled test code, by file name."""
_decorated: set[str] = set()
"""Decorated test functions with checks: under this name the tests may call an object of the solution instead."""
_ended: set[str] = set()
"""Those of them that reached their end."""
_Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef)
_Loop = (ast.For, ast.AsyncFor, ast.While)
_MAX_CHARACTERS = 200


def compile_tests(source: str) -> Any:
    """Compile test code under a file name of its own, so that a traceback leads to its syntax tree."""
    name = f"<tests {len(_trees)}>"
    tree = ast.parse(source)
    for node in tree.body:
        if not isinstance(node, _Definition) or not node.name.startswith(("test", "check")):
            continue
        if node.decorator_list and any(map(_is_check, _walk_scope(node))):
            _decorated.add(node.name)
            node.decorator_list.append(ast.Name(END, ast.Load()))
    source = ast.unparse(tree)  # one statement per line
    _trees[name] = ast.parse(source, name)
    return compile(source, name, "exec", 0, True)


def report_end(function: Any) -> Any:
    """Decorate a test function so that it reports that it reached its end."""

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


def find_incomplete_test(source: str) -> str:
    """Return the error of a step that passed but called a test function that never reached its end; otherwise ""."""
    functions = (node.func for node in _walk_scope(ast.parse(source)) if isinstance(node, ast.Call))
    called = {function.id for function in functions if isinstance(function, ast.Name)}
    missing = sorted((called & _decorated) - _ended)
    return f"{missing[0]} did not reach its end: the solution's decorator did not run it" if missing else ""


def uses_name(name: str) -> bool:
    """Whether the tests so far use a name, alone or as an attribute."""
    nodes = (node for tree in _trees.values() for node in ast.walk(tree))
    return any(name in (getattr(node, "id", None), getattr(node, "attr", None)) for node in nodes)


def is_failed_check(error: BaseException) -> bool:
    """Whether an exception is a failed assertion of the tests (`assert`, `self.assertEqual`, `pytest.fail`)."""
    if hasattr(error, "_of_solution"):
        return False
    return isinstance(error, AssertionError) or type(error).__module__ == "_pytest.outcomes"


def find_skipped_check(error: BaseException) -> str:
    """Return the check that is not reached if the solution swallows an exception now.

    Empty if there is none, or if a `raise` statement of the tests raised the exception: then it is meant to be caught.
    """
    entries = list[TracebackType]()
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in _trees:
            entries.append(trace)
        trace = trace.tb_next
    if not entries:
        return ""
    last = entries[-1]
    if not hasattr(error, "_of_solution"):
        nodes = ast.walk(_trees[last.tb_frame.f_code.co_filename])
        if any(isinstance(node, ast.Raise) and _contains(node, last.tb_lineno) for node in nodes):
            return ""
    return next((ast.unparse(check)[:_MAX_CHARACTERS] for entry in entries for check in _remaining_checks(entry)), "")


def _remaining_checks(entry: TracebackType) -> Iterator[ast.AST]:
    """Yield the checks that one frame of the tests did not complete.

    If the frame still runs, it is leaving a `with` statement, and the checks of that statement remain. During
    `__exit__`, the frame's line is in the head of the statement. If it has ended, the checks of its function remain.
    """
    frame, line = entry.tb_frame, entry.tb_lineno
    tree = _trees[frame.f_code.co_filename]
    running: FrameType | None = sys._getframe()
    while running is not None and running is not frame:
        running = running.f_back
    scopes: list[Any] = []
    if running is not None:
        for node in ast.walk(tree):
            if isinstance(node, (ast.With, ast.AsyncWith)):
                head_end = max(item.context_expr.end_lineno or 0 for item in node.items)
                if node.lineno <= frame.f_lineno <= head_end:
                    scopes.append(node)
    else:
        scopes = [node for node in ast.walk(tree) if isinstance(node, _Function) and _contains(node, line)]
        scopes.sort(key=lambda node: (node.lineno, node.col_offset))
    if not scopes:
        return
    innermost = scopes[-1]
    # A loop that was left would have run all of its checks again.
    loops = [node.lineno for node in _walk_scope(innermost) if isinstance(node, _Loop) and _contains(node, line)]
    first = min([line, *loops])
    for node in _walk_scope(innermost):
        if getattr(node, "end_lineno", 0) >= first and _is_check(node):
            yield node


def _contains(node: Any, line: int) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)


def _walk_scope(scope: ast.AST) -> Iterator[Any]:
    """Yield the nodes that run when a scope runs: not those of the functions that it defines."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _Function):
            yield from _walk_scope(child)


def _is_check(node: ast.AST) -> bool:
    """Whether a node is an assertion, or calls one. `assert False` is not: it marks what must not be reached."""
    if isinstance(node, ast.Assert):
        return not (isinstance(node.test, ast.Constant) and not node.test.value)
    if not isinstance(node, ast.Call):
        return False
    called = {part_node.id for part_node in (node.func, *node.args) if isinstance(part_node, ast.Name)}
    if any(function_name.startswith("assert") for function_name in (getattr(node.func, "attr", ""), *called)):
        return True
    # A call of a function of the tests that asserts
    nodes = (definition for tree in _trees.values() for definition in ast.walk(tree))
    functions = (
        definition for definition in nodes if isinstance(definition, _Definition) and definition.name in called
    )
    return any(isinstance(inner, ast.Assert) for function in functions for inner in ast.walk(function))
