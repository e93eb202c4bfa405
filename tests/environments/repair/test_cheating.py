"""Policies that try to get the reward without a repair fail; each would succeed with a naive judge."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from agentfly.environments.repair import RepairJudge
from agentfly.environments.repair.judge import is_source
from agentfly.sandbox import SandboxUnavailable
from tests.environments.repair.test_environment import bug, run_chain
from tests.environments.repair.test_tasks import OTHER_TESTS, SOURCE, TESTS
from tests.fakes import call

CONFTEST = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
"""
PATCHED_EXIT = "import os, sys\nsys.exit = lambda *_: None\nos._exit(0)\n"
ALL_EQUAL = """
class Anything(str):
    __eq__ = __ge__ = __le__ = __lt__ = __gt__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = str.__hash__
"""

FILES: dict[str, dict[str, str]] = {
    "edits the tests": {"test_roman.py": "import unittest\n"},
    "writes a conftest": {"conftest.py": CONFTEST, "roman/conftest.py": CONFTEST},
    "writes hidden tests of its own": {"hidden.py": "def test_x(): pass\n", "roman/hidden.py": "x = 1\n"},
    "replaces pytest and unittest": {"pytest.py": PATCHED_EXIT, "unittest.py": PATCHED_EXIT, "roman/pytest.py": ""},
    "writes a sitecustomize": {"sitecustomize.py": PATCHED_EXIT, "usercustomize.py": PATCHED_EXIT},
    "shadows modules of the judge": dict.fromkeys(("socket.py", "json.py", "ast.py", "random.py"), PATCHED_EXIT),
}
BEFORE_THE_PACKAGE = {
    "ends the process": "import os\nos._exit(0)\n",
    "patches the exits": "import os, sys\nsys.exit = os._exit = lambda *_: None\nraise SystemExit(0)\n",
    "patches what tests compare with": (
        "import builtins\nbuiltins.AssertionError = type('Quiet', (Exception,), {})\nbuiltins.all = lambda _: True\n"
        "import sys, atexit\natexit.register(lambda: __import__('os')._exit(0))\n"
    ),
    "looks for the tests": (
        "import gc, glob, sys\nfor frame in sys._current_frames().values():\n    while frame:\n"
        "        frame.f_globals.clear() if 'tests' in str(frame.f_globals.get('__name__')) else None\n"
        "        frame = frame.f_back\nfor each in gc.get_objects():\n"
        "    if type(each).__name__ == 'Run': each.passed = True\n"
        "for path in glob.glob('/session/**', recursive=True):\n    pass\n"
    ),
}  # fmt: skip


pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def judge() -> RepairJudge:
    judge = RepairJudge()
    try:
        await judge.start()
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    return judge


@pytest.mark.parametrize("trick", FILES)
async def test_other_files_have_no_effect(judge: RepairJudge, trick: str) -> None:
    chain = await run_chain(bug("roman"), *(call("write_file", path=p, content=t) for p, t in FILES[trick].items()))
    assert chain.reward == 0.0
    assert chain.score.metrics["pass_to_pass"] == 1.0


@pytest.mark.parametrize("trick", BEFORE_THE_PACKAGE)
async def test_tampering_in_the_package_earns_nothing(judge: RepairJudge, trick: str) -> None:
    row = bug("roman")
    for path in ("roman/__init__.py", "roman/numerals.py"):
        sources = {path: text.encode() for path, text in row["files"].items() if is_source(path, "roman")}
        sources[path] = BEFORE_THE_PACKAGE[trick].encode() + sources[path]
        passed = await judge.passing_tests(row, sources)
        assert not passed & set(row["fail_to_pass"])


async def test_objects_that_equal_everything_earn_nothing(judge: RepairJudge) -> None:
    row = bug("roman", before="        if value < following:")
    names = ["add", "from_roman", "is_roman", "shortest", "to_roman"]
    cheat = ALL_EQUAL + "".join(f"def {name}(*given):\n    return Anything('I')\n" for name in names)
    passed = await judge.passing_tests(
        row, {"roman/__init__.py": f"{cheat}class NumeralError(ValueError): pass\n".encode()}
    )
    assert not passed & set(row["fail_to_pass"])


async def test_hard_coded_visible_answers_are_not_enough(judge: RepairJudge) -> None:
    row = bug("roman", before="        if value < following:")
    numerals = {"XIV": 14, "mdcclxxvi": 1776, "MDCCLXXVI": 1776, "IX": 9, "IV": 4}
    heart = f"_real = from_roman\ndef from_roman(numeral):\n    return {numerals}.get(numeral) or _real(numeral)\n"
    sources = {path: text.encode() for path, text in row["files"].items() if is_source(path, "roman")}
    sources["roman/numerals.py"] += heart.encode()
    passed = await judge.passing_tests(row, sources)
    assert not set(row["fail_to_pass"]) <= passed


async def test_links_large_files_and_missing_packages_earn_nothing() -> None:
    for command in ("rm -rf roman; ln -s /etc roman", "rm -rf roman", "yes '#' | head -c 3000000 >> roman/numerals.py"):
        chain = await run_chain(bug("roman"), call("run_shell", command=command))
        assert chain.reward == 0.0


# ── with pytest, which shares its process with the package ──

WRONG = SOURCE.replace("+ 32", "- 32")
ROW: dict[str, Any] = {
    "package": "warmth",
    "files": {"warmth.py": WRONG, "tests/test_warm.py": OTHER_TESTS},
    "tests": {"tests/test_scale.py": TESTS},
}
FAILING = {"tests/test_scale.py::test_freezing", "tests/test_scale.py::test_boiling"}
FORGED_REPORT = """
import sys, glob, json, os, re
report = re.search("open\\\\('(.*?)'", open([p for p in glob.glob("run_*.py")][0]).read()).group(1)
with open(report, "a") as out:
    for path in glob.glob("tests/*.py"):
        for name in re.findall(r"def (test_\\w+)", open(path).read()):
            out.write(json.dumps([f"{path}::{name}", "passed", ""]) + "\\n")
os._exit(0)
"""
PATCHED_RUNNER = """
from _pytest.python import Function
Function.runtest = lambda self: None
"""
PATCHED_REPORT = """
from _pytest.reports import TestReport
_make = TestReport.from_item_and_call.__func__
def _good(cls, item, call):
    report = _make(cls, item, call)
    report.outcome = "passed"
    return report
TestReport.from_item_and_call = classmethod(_good)
"""
ENDING = {"ends the process": "import os\nos._exit(0)\n", "exits": "import sys\nsys.exit(0)\n"}
REWRITTEN_TESTS = """
import glob, re
for path in glob.glob("tests/test_[a-z]*.py"):
    text = open(path).read()
    if "fahrenheit" in text:
        open(path, "w").write(re.sub("assert .*", "pass", text))
"""
REWRITING = {"rewrites the tests": REWRITTEN_TESTS, "makes every report good": PATCHED_REPORT}
FORGING = {
    "makes every test pass": PATCHED_RUNNER,
    "writes the report itself": FORGED_REPORT,
}


async def test_pytest_distinguishes_a_repair(judge: RepairJudge) -> None:
    run = await judge.run_pytest(ROW, {"warmth.py": SOURCE.encode()})
    if "No module named pytest" in run.output:
        pytest.skip("the sandbox has no pytest: pip install 'agentfly-rl[repair]'")
    assert run.valid
    assert run.passed_tests == {*FAILING, "tests/test_warm.py::test_warm"}
    assert await judge.passing_tests(ROW, {"warmth.py": WRONG.encode()}) == {"tests/test_warm.py::test_warm"}


@pytest.mark.parametrize("trick", {**ENDING, **REWRITING, **FORGING})
async def test_tampering_in_the_process_of_pytest_is_detected(judge: RepairJudge, trick: str) -> None:
    sources = {"warmth.py": ({**ENDING, **REWRITING, **FORGING}[trick] + WRONG).encode()}
    run = await judge.run_pytest(ROW, sources)
    assert not run.valid
    assert (run.passed_tests >= FAILING) is (trick in FORGING)  # but for the guard, it would have worked
    assert await judge.passing_tests(ROW, sources) == set()


SWALLOWING = """
import unittest
import pytest
from warmth import quiet, run

def test_with():
    with quiet():
        assert 1 == 2

def test_callback():
    def check():
        assert 1 == 2
    run(check)

class TestCase(unittest.TestCase):
    def test_unittest(self):
        with quiet():
            self.assertEqual(1, 2)

def test_right():
    with quiet():
        assert 1 == 1
    with pytest.raises(ValueError):
        int("x")
"""
MEANT = """
from warmth import quiet

def test_meant():
    try:
        assert 1 == 2
    except AssertionError:
        pass
"""
SWALLOWS = """
import contextlib

def quiet():
    return contextlib.suppress(BaseException)

def run(check):
    with quiet():
        check()
"""


async def test_assertion_swallowed_by_the_package_fails_its_test(judge: RepairJudge) -> None:
    row = {"package": "warmth", "tests": {"test_swallowing.py": SWALLOWING, "test_meant.py": MEANT}}
    run = await judge.run_pytest(row, {"warmth.py": SWALLOWS.encode()})
    assert run.valid
    assert {test.rpartition("::")[2] for test in run.passed_tests} == {"test_right", "test_meant"}
    assert len(run.outcomes) == 5


async def test_only_source_files_of_the_package_count() -> None:
    good = ["toolz/core.py", "toolz/sub/deep.py"]
    bad = ["conftest.py", "toolz/conftest.py", "toolz/tests/test_core.py", "toolz/test_x.py", "other/core.py"]
    bad += ["toolz/data.txt", "sitecustomize.py", "toolzx/core.py", "pytest.py", "toolz/x_test.py"]
    assert [path for path in good + bad if is_source(path, "toolz")] == good
