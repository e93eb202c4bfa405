"""Judges a repaired package by tests that the chain never had.

Of the chain's folder only the package's own source files are taken, into a session that the chain never saw. Hidden
tests of plain functions run as CodeJudge runs them: the package in a process of its own, which has no part in the
verdict. Test files of pytest share their process with the package, as everywhere; see `pytest_run` for what is done
about that.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, ClassVar

from agentfly.environments.code_judge import CodeJudge
from agentfly.environments.repair.pytest_run import Run, run_pytest
from agentfly.errors import DataError
from agentfly.sandbox import Limits

_MOST_BYTES = 1 << 20
_SOLUTION = """
import os
for path, data in {files!r}.items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
{imports}
"""


class RepairJudge(CodeJudge):
    """Runs hidden tests against what a chain made of a package."""

    limits = Limits(seconds=10, memory=1 << 30, output=1 << 20)
    pytest_limits: ClassVar[Limits] = Limits(seconds=180, memory=2 << 30, disk=256 << 20, inodes=50_000, output=1 << 20)
    """Of a whole run of pytest."""

    async def passed(self, columns: Mapping[str, Any], sources: Mapping[str, bytes]) -> frozenset[str]:
        """The tests that a package passes; `columns` are those of its task, `sources` its files as they are now."""
        tests = columns.get("tests")
        if isinstance(tests, str) and sum(map(len, sources.values())) > _MOST_BYTES:
            return frozenset()
        if isinstance(tests, str):
            return await self._plain(columns["package"], tests, sources)
        if isinstance(tests, Mapping):
            run = await self.run_pytest(columns, sources)
            return run.passed if run.honest else frozenset()
        raise DataError(f"the column 'tests' must be a text, or map paths of test files to theirs, not {tests!r:.80}")

    async def _plain(self, package: str, tests: str, sources: Mapping[str, bytes]) -> frozenset[str]:
        solution, rest = taken_apart(package, tests, sources)
        verdict = await self.unit_tests(solution, rest)
        failed = {failure.partition("(")[0] for failure in verdict.failures}
        return frozenset(name for name in names_of_tests(tests) if name not in failed)

    async def run_pytest(self, columns: Mapping[str, Any], sources: Mapping[str, bytes]) -> Run:
        """What pytest says of all test files, in a fresh session of the task's image or of this machine's sandbox."""
        async with self._turns:
            return await run_pytest(columns, sources, self.mechanism, self.pytest_limits)


def taken_apart(package: str, tests: str, sources: Mapping[str, bytes]) -> tuple[str, str]:
    """The package as a solution that has what the tests import of it, and the tests without these imports."""
    tree = ast.parse(tests)
    ours = [node for node in tree.body if isinstance(node, ast.ImportFrom) and _root(node) == package]
    imports = "\n".join(map(ast.unparse, ours))
    rest = ast.Module([node for node in tree.body if node not in ours], [])
    return _SOLUTION.format(files=dict(sources), imports=imports), ast.unparse(rest)


def _root(node: ast.ImportFrom) -> str:
    return (node.module or "").partition(".")[0]


def names_of_tests(tests: str) -> list[str]:
    """The names of the tests in a text."""
    functions = (node for node in ast.parse(tests).body if isinstance(node, ast.FunctionDef))
    return [node.name for node in functions if node.name.startswith("test")]
