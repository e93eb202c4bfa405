"""Runs the test files of a package with pytest, in a session of its own.

Test files, configuration and whatever else is not the package's source are the task's own; settings of the command line
and plugins that happen to be installed do not count. But the package runs in pytest's process, and could forge what
that says. So among the tests are some, named at random, that must fail and some that must pass: code that makes every
test pass, ends the process, or writes the report itself gives itself away. A test that passes although one of its
assertions failed, because the package caught that, has failed, unless its file names AssertionError. Code made to see
through this very guard could still forge; tests of plain functions (see `judge`) leave it no such way.
"""

from __future__ import annotations

import json
import posixpath
import random
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentfly.errors import DataError
from agentfly.sandbox import FileAccessError, Limits, Sandbox, Session
from agentfly.sandbox.shared import Mechanism, shared_sandbox

_MOST_REPORT = 16 << 20
_RESULTS = ("fail_to_pass", "pass_to_pass")
_PLUGIN = """
import json, unittest
from _pytest.assertion import rewrite
_out = open({report!r}, "a")
_failed = []  # assertions of the test that runs
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
        return "AssertionError" not in file.read()  # else the test may mean it to fail
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        said = report.longreprtext if report.failed else ""
        outcome = "failed" if _is_swallowed(report) else report.outcome
        _out.write(json.dumps([report.nodeid, outcome, said[-4000:]]) + "\\n")
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
_PASSES = ("assert [1, 2] == sorted([2, 1])", "assert 'a'.upper() == 'A'", "assert isinstance(3, int)")
_FAILS = ("assert [1, 2] == sorted([2, 3])", "assert 'a'.upper() == 'B'", "raise ValueError('no')")


@dataclass(frozen=True)
class Run:
    """What a run of pytest came to."""

    results: Mapping[str, str]
    """Each test's outcome: `passed`, `failed` or `skipped`."""
    told: Mapping[str, str]
    """What pytest showed of each test that failed."""
    honest: bool
    """Whether the tests that had to fail did, and those that had to pass."""
    output: str = ""

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(test for test, outcome in self.results.items() if outcome == "passed")


def is_test_file(path: str) -> bool:
    """Whether a path belongs to the tests of a package, and so is not the chain's to change."""
    *folders, name = path.split("/")
    named = name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
    return named or bool({"test", "tests", "testing"} & set(folders))


def is_source(path: str, package: str) -> bool:
    """Whether a path is a source file of the package, which is what a chain repairs."""
    inside = path == f"{package}.py" or path.startswith(f"{package}/")
    return inside and path.endswith(".py") and not is_test_file(path)


async def run_pytest(
    columns: Mapping[str, Any], sources: Mapping[str, bytes], mechanism: Mechanism, limits: Limits
) -> Run:
    """Run all test files of a task against its package as it is now."""
    session = await (await sandbox_of(columns, mechanism)).open_session(limits)
    try:
        return await _run(session, columns, sources)
    finally:
        await session.close()


async def _run(session: Session, columns: Mapping[str, Any], sources: Mapping[str, bytes]) -> Run:
    package = columns["package"]
    await unpack(session, columns)
    own = {path: text for path, text in (columns.get("files") or {}).items() if not is_source(path, package)}
    own |= columns["tests"]
    named = {test.partition("::")[0] for name in _RESULTS for test in columns.get(name) or ()}
    tests = sorted(named | {path for path in own if _is_collected(path)})
    if not tests:
        raise DataError("the task has no test file: none is named test_….py or …_test.py")
    guard = _Guard(posixpath.dirname(tests[0]), posixpath.basename(package))
    own |= guard.files
    for path, data in {**own, **sources}.items():
        await session.put(path, _encoded(data))
    outcome = await session.shell(_command(package, [*tests, guard.path], guard.plugin))
    if not outcome.files_kept or not await _are_unchanged(session, own):
        return Run({}, {}, False, outcome.text)
    return guard.read(await _content(session, guard.report), outcome.text)


def _command(package: str, tests: list[str], plugin: str) -> str:
    roots = ":".join(sorted({posixpath.dirname(package) or ".", "."}))
    return (
        f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH={shlex.quote(roots)} python3 -B -m pytest -q --rootdir=. "
        f"-p no:cacheprovider -p {plugin} -o addopts= -o filterwarnings= {shlex.join(tests)}"
    )


def _encoded(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data


async def _are_unchanged(session: Session, files: Mapping[str, Any]) -> bool:
    """Whether the tests are still what they were before the package ran beside them."""
    python = {path: _encoded(data) for path, data in files.items() if path.endswith(".py")}
    return all([await _content(session, path) == data for path, data in python.items()])


async def _content(session: Session, path: str) -> bytes:
    try:
        return await session.get(path, _MOST_REPORT)
    except FileAccessError:
        return b""


async def sandbox_of(columns: Mapping[str, Any], mechanism: Mechanism) -> Sandbox:
    """Where the sessions of a task are: in containers of its image, where it has one."""
    if image := columns.get("image_id"):
        from agentfly.resources.runtimes.container import Container  # late: few tasks have one

        mechanism = Container(image=image)
    return await shared_sandbox(mechanism)


async def unpack(session: Session, columns: Mapping[str, Any]) -> None:
    """Bring the folder of the task's image, where one is named, into the session's own."""
    if folder := columns.get("folder"):
        outcome = await session.run(f"exec({_COPY!r}, {{'folder': {str(folder)!r}}})")  # leaves no names behind
        if not outcome.ok:
            raise DataError(f"the image's folder {folder!r} cannot be copied: {outcome.error}")


def _is_collected(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


class _Guard:
    """A test file of known results, and the plugin that reports."""

    def __init__(self, folder: str, package: str) -> None:
        self.plugin, self.report = (f"run_{secrets.token_hex(8)}" for _ in range(2))
        self.path = posixpath.join(folder, f"test_{secrets.token_hex(4)}.py")
        bodies = [(body, "passed") for body in _PASSES] + [(body, "failed") for body in _FAILS]
        random.SystemRandom().shuffle(bodies)
        named = [(f"test_{secrets.token_hex(4)}", body, wanted) for body, wanted in bodies]
        self._wanted = {f"{self.path}::{name}": wanted for name, _, wanted in named}
        self.files = {
            self.path: "\n\n\n".join([f"import {package}", *(f"def {n}():\n    {body}" for n, body, _ in named)])
            + "\n",
            f"{self.plugin}.py": _PLUGIN.format(report=self.report),
        }

    def read(self, report: bytes, output: str) -> Run:
        results, told = dict[str, str](), dict[str, str]()
        for line in report.splitlines():
            try:
                test, outcome, said = json.loads(line)
            except ValueError:
                return Run({}, {}, False, output)
            if results.get(test) != "failed":  # a teardown that fails after the test passed
                results[test], told[test] = str(outcome), str(said)
        honest = all(results.pop(test, None) == wanted for test, wanted in self._wanted.items())
        return Run(results, told, honest, output)
