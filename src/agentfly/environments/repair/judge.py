"""Scores a repaired package by tests that the chain never had.

Only the package's own source files are taken from the chain's folder, into a new session. A text of plain test
functions runs as `CodeJudge` runs unit tests: the package is in a separate process and has no part in the verdict.

Test files of pytest share their process with the package, which could forge the report. Test files, configuration and
every other file are therefore the task's own, and installed plugins and settings are ignored. Control tests with random
names, some of which must pass and some of which must fail, run along: code that makes every test pass, ends the process
or writes the report itself changes their outcome, and then no test counts. A test that passes although one of its
assertions failed, because the package caught the exception, has failed unless its file names AssertionError. Code
written against this very check can still forge a report; plain test functions leave it no such way.
"""

from __future__ import annotations

import ast
import json
import posixpath
import random
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentfly.environments.code_judge import CodeJudge
from agentfly.errors import DataError
from agentfly.sandbox import FileAccessError, Limits, Sandbox, Session
from agentfly.sandbox.mechanisms import Mechanism, shared_sandbox

_MAX_SOURCE_BYTES = 1 << 20
_MAX_FILE_BYTES = 16 << 20
_SOLUTION = """
import os
for path, data in {files!r}.items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
{imports}
"""
_PLUGIN = """
import json, unittest
from _pytest.assertion import rewrite
_out = open({report!r}, "a")
_failed = []  # failed assertions of the current test
_explain = rewrite._format_explanation
def _note(explanation):  # called where a rewritten `assert` fails
    _failed.append(explanation)
    return _explain(explanation)
rewrite._format_explanation = _note
class _Failure(AssertionError):
    def __init__(self, *args):
        _failed.append(args)
        super().__init__(*args)
unittest.TestCase.failureException = _Failure
def pytest_runtest_setup(item):
    _failed.clear()
def _is_swallowed(report):
    if report.when != "call" or report.outcome != "passed" or not _failed:
        return False
    with open(report.nodeid.partition("::")[0], encoding="utf-8") as file:
        return "AssertionError" not in file.read()  # else the test may expect the failure
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        traceback = report.longreprtext if report.failed else ""
        outcome = "failed" if _is_swallowed(report) else report.outcome
        _out.write(json.dumps([report.nodeid, outcome, traceback[-4000:]]) + "\\n")
        _out.flush()
"""
_COPY = """
import os, shutil
for entry in os.scandir(folder):
    if entry.is_dir(follow_symlinks=False):
        shutil.copytree(entry.path, entry.name, symlinks=True)
    else:
        shutil.copy2(entry.path, entry.name, follow_symlinks=False)
"""
_CONTROLS = {
    "assert [1, 2] == sorted([2, 1])": "passed", "assert 'a'.upper() == 'A'": "passed",
    "assert isinstance(3, int)": "passed", "assert [1, 2] == sorted([2, 3])": "failed",
    "assert 'a'.upper() == 'B'": "failed", "raise ValueError('no')": "failed",
}  # fmt: skip
"""Bodies of the control tests and their outcomes."""


@dataclass(frozen=True)
class PytestRun:
    """The result of a run of pytest."""

    outcomes: Mapping[str, str]
    """Outcome of each test: `passed`, `failed` or `skipped`."""
    tracebacks: Mapping[str, str]
    """What pytest shows of each failed test."""
    valid: bool
    """Whether all control tests had their outcome and no test file was changed."""
    output: str = ""

    @property
    def passed_tests(self) -> frozenset[str]:
        return frozenset(test for test, outcome in self.outcomes.items() if outcome == "passed")


class RepairJudge(CodeJudge):
    """Runs hidden tests against a repaired package."""

    limits = Limits(seconds=10, memory=1 << 30, output=1 << 20)
    pytest_limits: ClassVar[Limits] = Limits(seconds=180, memory=2 << 30, disk=256 << 20, inodes=50_000, output=1 << 20)
    """Limits of a whole run of pytest."""

    async def passing_tests(self, columns: Mapping[str, Any], sources: Mapping[str, bytes]) -> frozenset[str]:
        """Return the names of the tests that pass.

        Args:
            columns: Columns of the task: `package`, `tests`, and for pytest also `files`.
            sources: Current source files of the package by path.
        """
        tests = columns.get("tests")
        if isinstance(tests, str):
            if sum(map(len, sources.values())) > _MAX_SOURCE_BYTES:
                return frozenset()
            verdict = await self.unit_tests(*build_solution(columns["package"], tests, sources))
            failed = {failure.partition("(")[0] for failure in verdict.failures}
            return frozenset(name for name in list_test_names(tests) if name not in failed)
        if isinstance(tests, Mapping):
            run = await self.run_pytest(columns, sources)
            return run.passed_tests if run.valid else frozenset()
        raise DataError(f"the column 'tests' must be a text, or map paths of test files to texts, not {tests!r:.80}")

    async def run_pytest(self, columns: Mapping[str, Any], sources: Mapping[str, bytes]) -> PytestRun:
        """Run all test files with pytest in a new session, in a container if the task has an `image_id`."""
        package = columns["package"]
        files = {path: data for path, data in (columns.get("files") or {}).items() if not is_source(path, package)}
        files |= columns["tests"]
        names = [*(columns.get("fail_to_pass") or ()), *(columns.get("pass_to_pass") or ())]
        test_files = {path for path in files if re.search(r"(^|/)(test_[^/]*|[^/]*_test)\.py\Z", path)}
        tests = sorted({name.partition("::")[0] for name in names} | test_files)
        if not tests:
            raise DataError("the task has no test file: none is named test_….py or …_test.py")

        plugin, report = (f"run_{secrets.token_hex(8)}" for _ in range(2))
        control_path = posixpath.join(posixpath.dirname(tests[0]), f"test_{secrets.token_hex(4)}.py")
        controls = [(f"test_{secrets.token_hex(4)}", body, outcome) for body, outcome in _CONTROLS.items()]
        random.SystemRandom().shuffle(controls)
        functions = [f"def {name}():\n    {body}" for name, body, _ in controls]
        files[control_path] = "\n\n\n".join([f"import {posixpath.basename(package)}", *functions]) + "\n"
        files[f"{plugin}.py"] = _PLUGIN.format(report=report)
        encoded = {path: data.encode() if isinstance(data, str) else data for path, data in files.items()}

        roots = ":".join(sorted({posixpath.dirname(package) or ".", "."}))
        # The session's own PYTHONPATH has the packages of this virtual environment, pytest among them.
        search_path = shlex.quote(roots) + "${PYTHONPATH:+:$PYTHONPATH}"
        command = (
            f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH={search_path} python3 -B -m pytest -q --rootdir=. "
            f"-p no:cacheprovider -p {plugin} -o addopts= -o filterwarnings= {shlex.join([*tests, control_path])}"
        )
        async with self._semaphore:
            session = await (await open_task_sandbox(columns, self.mechanism)).open_session(self.pytest_limits)
            try:
                await copy_image_folder(session, columns)
                for path, data in {**encoded, **sources}.items():
                    await session.put(path, data)
                outcome = await session.shell(command)
                # The package ran beside the tests and may have rewritten them.
                python = {path: data for path, data in encoded.items() if path.endswith(".py")}
                unchanged = outcome.files_kept and all(
                    [await _read_file(session, path) == data for path, data in python.items()]
                )
                lines = (await _read_file(session, report)).splitlines() if unchanged else []
            finally:
                await session.close()

        invalid = PytestRun({}, {}, False, outcome.text)
        outcomes, tracebacks = dict[str, str](), dict[str, str]()
        for line in lines:
            try:
                test, test_outcome, traceback = json.loads(line)
            except ValueError:
                return invalid
            if outcomes.get(test) != "failed":  # a later line is a teardown: its failure counts, its success does not
                outcomes[test], tracebacks[test] = str(test_outcome), str(traceback)
        as_expected = [outcomes.pop(f"{control_path}::{name}", None) == expected for name, _, expected in controls]
        return PytestRun(outcomes, tracebacks, all(as_expected), outcome.text) if unchanged else invalid


def build_solution(package: str, tests: str, sources: Mapping[str, bytes]) -> tuple[str, str]:
    """Return a solution for `CodeJudge.unit_tests`, and the tests for it.

    The solution writes the package and has the imports that the tests make from it; the tests have them no more.
    """
    tree = ast.parse(tests)
    imports = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package
    ]
    body = ast.Module([node for node in tree.body if node not in imports], [])
    return _SOLUTION.format(files=dict(sources), imports="\n".join(map(ast.unparse, imports))), ast.unparse(body)


def list_test_names(tests: str) -> list[str]:
    """Return the names of the test functions in a text."""
    functions = (node for node in ast.parse(tests).body if isinstance(node, ast.FunctionDef))
    return [node.name for node in functions if node.name.startswith("test")]


def is_test_file(path: str) -> bool:
    """Whether a path belongs to the tests of a package, which a chain cannot change."""
    *folders, name = path.split("/")
    is_named_so = name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
    return is_named_so or bool({"test", "tests", "testing"} & set(folders))


def is_source(path: str, package: str) -> bool:
    """Whether a path is a source file of the package, which a chain repairs."""
    is_inside = path == f"{package}.py" or path.startswith(f"{package}/")
    return is_inside and path.endswith(".py") and not is_test_file(path)


async def open_task_sandbox(columns: Mapping[str, Any], mechanism: Mechanism) -> Sandbox:
    """Return the sandbox of a task: containers of its `image_id`, if it has one."""
    if image := columns.get("image_id"):
        from agentfly.resources.runtimes.container import Container  # late: few tasks have an image

        mechanism = Container(image=image)
    return await shared_sandbox(mechanism)


async def copy_image_folder(session: Session, columns: Mapping[str, Any]) -> None:
    """Copy the column `folder`, a folder of the task's image, into the session's folder."""
    if folder := columns.get("folder"):
        outcome = await session.run(f"exec({_COPY!r}, {{'folder': {str(folder)!r}}})")  # exec: it leaves no variables
        if not outcome.ok:
            raise DataError(f"the image's folder {folder!r} cannot be copied: {outcome.error}")


async def _read_file(session: Session, path: str) -> bytes:
    try:
        return await session.get(path, _MAX_FILE_BYTES)
    except FileAccessError:
        return b""
