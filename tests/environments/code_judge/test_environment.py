"""The judge of code: honest solutions pass and dishonest ones fail, in real sessions of every mechanism."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from agentfly.environments import CodeJudge
from agentfly.environments.code_judge.unit_tests import UnitTests
from agentfly.errors import DataError
from agentfly.sandbox import Limits, SandboxUnavailable
from tests.environments.judging import ADD, ANYTHING, DISHONEST, HANGING, HONEST, TAMPERING, TELLING
from tests.environments.swallowing import CATCHING, SWALLOWING

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Strict(CodeJudge):
    limits = Limits(seconds=1, memory=256 << 20, processes=24, output=1 << 16)
    total_seconds = 1.5


class Patient(CodeJudge):
    limits = Limits(seconds=20, memory=512 << 20)


async def start_judge(kind: type[CodeJudge], **changed: Any) -> CodeJudge:
    judge = type(kind.__name__, (kind,), changed)()
    try:
        await judge.start()
    except SandboxUnavailable as error:
        pytest.skip(f"no such sandbox works here: {error}")
    return judge


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def judge() -> AsyncIterator[CodeJudge]:
    """A judge with time: an honest solution does not fail on a busy machine."""
    yield await start_judge(Patient)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def strict() -> AsyncIterator[CodeJudge]:
    """A judge without patience, for those who hang."""
    yield await start_judge(Strict)


ALL_HONEST = HONEST | CATCHING


@pytest.mark.parametrize("name", ALL_HONEST)
async def test_honest_solution_passes_all_tests(judge: CodeJudge, name: str) -> None:
    solution, tests = ALL_HONEST[name]
    if name in ("numpy", "sympy") and (missing := (await judge.run_program(f"import {name}")).error):
        pytest.skip(f"the sandbox has no {name}: {missing}")
    verdict = await judge.unit_tests(solution, tests)
    assert verdict.failures == ()
    assert verdict.passed == verdict.total == UnitTests.parse(tests).total


@pytest.mark.parametrize("name", [name for name in ALL_HONEST if name not in ("main guard", "loud")])
async def test_plain_execution_agrees(judge: CodeJudge, name: str) -> None:
    """The honest tests are right: solution and tests in one script run to the end."""
    solution, tests = ALL_HONEST[name]
    steps = "\n".join(step.source for step in UnitTests.parse(tests).steps)
    printed = await judge.run_program(f"{solution}\n{steps}\nprint('to the end')")
    assert printed.error == ""
    assert printed.text.endswith("to the end\n")


# A module that the tests import is one the solution may try to shadow.
TESTS = ["import statistics, heapq, bisect, fractions", *ADD]


@pytest.mark.parametrize("name", DISHONEST)
async def test_dishonest_solution_earns_nothing(judge: CodeJudge, strict: CodeJudge, name: str) -> None:
    verdict = await (strict if name in HANGING else judge).unit_tests(DISHONEST[name], TESTS)
    assert verdict.passed == 0
    assert verdict.total == len(verdict.failures) == 3


@pytest.mark.parametrize("name", TELLING)
async def test_solution_never_decides_a_comparison(judge: CodeJudge, strict: CodeJudge, name: str) -> None:
    solution, test = TELLING[name]
    verdict = await (strict if "hang" in name else judge).unit_tests(ANYTHING + solution, test)
    assert verdict.passed == 0


@pytest.mark.parametrize("name", SWALLOWING)
async def test_swallowed_check_fails_the_test(judge: CodeJudge, name: str) -> None:
    verdict = await judge.unit_tests(*SWALLOWING[name])
    assert (verdict.passed, verdict.total) == (0, 1)


@pytest.mark.parametrize("mechanism", ["namespaces", "landlock"])
async def test_every_mechanism_separates_tests_and_solution(mechanism: str) -> None:
    judge = await start_judge(Patient, mechanism=mechanism)
    for name in ("function", "class", "in place", "exceptions", "closures and callbacks"):
        verdict = await judge.unit_tests(*HONEST[name])
        assert verdict.failures == (), name
    for name in TAMPERING:
        assert (await judge.unit_tests(DISHONEST[name], TESTS)).passed == 0, name


async def test_attacks_find_tests_that_are_there(judge: CodeJudge) -> None:
    """Else the attacks that look for them would prove nothing."""
    source = f"known = {ADD!r}\n"
    for name in ("the tests in its own memory", "the tests in its own pages"):
        assert (await judge.unit_tests(source + DISHONEST[name], TESTS)).passed == 3, name
    written = f"open('t.py', 'w').write({str(ADD)!r})\n"
    assert (await judge.unit_tests(written + DISHONEST["the tests in files"], TESTS)).passed == 3


async def test_broken_session_fails_only_the_test_that_broke_it(judge: CodeJudge) -> None:
    solution = "import os\ndef f(n):\n    return n if n != 2 else os._exit(0)"
    tests = "one = 1\nassert f(1) == one\nassert f(2) == 2\nassert f(3) == one + 2"
    verdict = await judge.unit_tests(solution, tests)
    assert verdict.passed == 2
    assert verdict.failures == ("assert f(2) == 2: the solution's process has ended",)


async def test_sessions_share_no_files(judge: CodeJudge) -> None:
    look = "import os\ndef f():\n    return os.path.exists('left') or os.path.exists('/tmp/left')\n"
    leave = "open('left', 'w').close()\nopen('/tmp/left', 'w').close()"
    assert (await judge.unit_tests(look + leave, ["assert f()"])).passed == 1
    assert (await judge.unit_tests(look, ["assert not f()"])).passed == 1


async def test_setup_may_fail_because_of_the_solution(judge: CodeJudge) -> None:
    verdict = await judge.unit_tests("x = 1", ["assert node.v == 1", "assert True"], setup="node = Node(1)")
    assert verdict.passed == 0
    assert verdict.failures[0] == "assert node.v == 1: NameError: name 'Node' is not defined"


async def test_total_time_is_limited(strict: CodeJudge) -> None:
    verdict = await strict.unit_tests("def f(n):\n    while n:\n        pass", ["assert f(1) is None"] * 4 + ["f(0)"])
    assert verdict.passed == 0
    assert verdict.failures[0].endswith("it took too long")
    assert verdict.failures[-1].endswith("there was no time left for it")


async def test_check_with_an_entry_point(judge: CodeJudge) -> None:
    tests = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9"
    for body, passed in (("n * n", 1), ("n + 2", 0)):
        verdict = await judge.unit_tests(f"def square(n):\n    return {body}", tests, entry_point="square")
        assert (verdict.passed, verdict.total) == (passed, 1)
    solution = "class Solution:\n    def square(self, n):\n        return n * n"
    assert (await judge.unit_tests(solution, tests, entry_point="Solution().square")).passed == 1
    with pytest.raises(DataError, match="entry_point, line 1 is not valid Python"):
        await judge.unit_tests(solution, tests, entry_point="a b")


async def test_concurrent_runs_and_a_cancelled_one(judge: CodeJudge) -> None:
    hung = asyncio.create_task(judge.unit_tests("def add(a, b):\n    while True: pass", ADD))
    await asyncio.sleep(0.2)
    hung.cancel()
    right = await asyncio.gather(*(judge.unit_tests("def add(a, b):\n    return a + b", ADD) for _ in range(8)))
    assert [verdict.rate for verdict in right] == [1.0] * 8
    assert hung.cancelled()


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "holds no test"),
        ("", "holds no test"),
        (["import math"], "holds no test"),
        ("def f():\n    assert True", "holds no test"),
        (["assert f(1) == 1", "assert f(2) = 2"], r"tests\[1\], line 1 is not valid Python"),
        ("x = 1\nassert (", "tests, line 2 is not valid Python"),
        ("assert 1\0", "tests.* is not valid Python"),
        (["return 1"], r"tests\[0\], line 1 is not valid Python: 'return' outside function"),
        ([1], "must be a text or a list of texts"),
        (None, "must be a text or a list of texts"),
        ("def test_a(fixture):\n    assert fixture", "test_a takes arguments"),
    ],
)
async def test_invalid_tests_are_a_data_error(judge: CodeJudge, tests: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        await judge.unit_tests("def f(n):\n    return n", tests)


async def test_missing_module_of_the_tests_is_a_data_error(judge: CodeJudge) -> None:
    with pytest.raises(DataError, match=r"No module named 'nowhere'.*import nowhere"):
        await judge.unit_tests("def f():\n    import nowhere", ["import nowhere\nassert f() == 1"])
    verdict = await judge.unit_tests("def f():\n    import nowhere", ["assert f() == 1"])
    assert "ModuleNotFoundError" in verdict.failures[0]


@pytest.mark.parametrize(
    ("solution", "test"),
    [
        ("def f():\n    return ImportError()", "raise f()"),
        (
            "import os, resource\ndef f():\n    resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1 << 20, 1 << 20))",
            "f()\nimport sqlite3\nassert sqlite3",
        ),
    ],
)
async def test_solution_cannot_cause_a_data_error(judge: CodeJudge, solution: str, test: str) -> None:
    verdict = await judge.unit_tests(solution, [test])
    assert (verdict.passed, verdict.total) == (0, 1)


async def test_objects_of_the_tests_are_rejected(judge: CodeJudge) -> None:
    verdict = await judge.unit_tests("def f(x):\n    return x", ["class Own: pass\nassert f(Own())"])
    assert "a Own cannot be given to the solution" in verdict.failures[0]


async def test_programs(judge: CodeJudge, strict: CodeJudge) -> None:
    program = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nprint('noise', file=sys.stderr)"
    assert (await judge.run_program(program, "1 2\n3")).text == "6\n"
    assert (await judge.run_program("if __name__ == '__main__':\n    print(ascii(input()))", "é")).text == "'\\xe9'\n"
    failed = await judge.run_program("print(1)\n1 / 0")
    assert failed.text == "1\n"
    assert failed.error == "The command ended with status 1. ZeroDivisionError: division by zero"
    assert "status 3" in (await judge.run_program("import os\nos._exit(3)")).error
    assert "took too long" in (await strict.run_program("while True: pass")).error
    assert (await strict.run_program("while True: print('x' * 1000)")).error
    short = await start_judge(Patient, limits=replace(Patient.limits, output=1 << 16))
    assert "more than it may" in (await short.run_program("print('x' * 100000)")).error
    await short.close()
    assert "signal 9" in (await judge.run_program("import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)")).error
